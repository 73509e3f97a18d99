"""The command `baton batch`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from baton import signals
from baton.services import credentials
from baton.services.cli.flags import Of, with_settings
from baton.services.config import Settings
from baton.services.errors import ConfigError
from baton.services.models import the_one
from baton.services.printing import complain, guard

BAD_INPUT = 2  # exit status


@with_settings("engine", "handoff", of=Of.ANY)
def batch(
    settings: Settings,
    *,
    requests: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="File of requests, in OpenAI's batch format.")
    ],
    results: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File for the results.")],
    url: Annotated[
        str, typer.Option(help="A running deployment to use; without it one is started.", metavar="URL")
    ] = "",
    api_key: Annotated[
        str,
        typer.Option(help="API key for --url, or file:PATH. [default: the configured one]", metavar="KEY"),
    ] = "",
    prefill: Annotated[int, typer.Option(help="Number of prefill workers.", min=0)] = 0,
    decode: Annotated[int, typer.Option(help="Number of decode workers.", min=0)] = 0,
    mixed: Annotated[
        int | None,
        typer.Option(
            help="Number of mixed workers, which do both. [default: 1 unless --prefill or --decode]", min=0
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Most requests in flight. [default: as many as the workers' batches hold]", min=1),
    ] = None,
    log_dir: Annotated[str, typer.Option(help="Folder for the processes' logs.", metavar="FOLDER")] = "",
) -> None:
    """Run a file of requests: OpenAI's batch format in and out.

    The same command resumes an interrupted batch. Exit status: 0, 1 if requests failed, 2 if the file of
    requests is invalid, 130 if interrupted.
    """
    guard()
    for number in signals.ending():
        signal.signal(number, signal.default_int_handler)  # like Ctrl-C, even during imports
    from baton.services.offline import batch as offline
    from baton.services.offline.client import Endpoint
    from baton.services.offline.errors import InputError
    from baton.services.offline.pipeline import default_concurrency, fleet_of

    _check_url(url, alone=not (prefill or decode or mixed))
    try:
        if url:
            endpoint = Endpoint(
                url.rstrip("/").removesuffix("/v1"),
                settings.router.request_timeout_s,
                _key(api_key, settings),
            )
            source = offline.running_deployment(endpoint, concurrency or offline.URL_CONCURRENCY)
        else:
            settings = the_one(settings, "", "`baton batch` without --url")
            fleet = fleet_of(prefill, decode, mixed)
            at_once = concurrency or default_concurrency(settings, fleet)
            source = offline.own_deployment(settings, fleet, at_once, log_dir)
        status = offline.run_batch(source, requests, results)
    except InputError as error:
        complain(f"baton: error: {error}")
        status = BAD_INPUT
    sys.exit(status)


def _check_url(url: str, *, alone: bool) -> None:
    if url and not alone:
        raise ConfigError("--url names a running deployment: leave out --prefill, --decode and --mixed")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: give it as http://HOST:PORT")


def _key(given: str, settings: Settings) -> str:
    keys = credentials.keys_of("--api-key", given) if given else credentials.api_keys(settings.router)
    return next(iter(keys), "")
