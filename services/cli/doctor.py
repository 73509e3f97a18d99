"""The commands `baton doctor` and `baton debug bundle`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.services.cli.flags import Of
from baton.services.cli.help import command
from baton.services.config import Settings
from baton.services.diagnosis.finding import Finding, Verdict
from baton.services.errors import ConfigError, ServiceError
from baton.services.models import Model

app = typer.Typer(
    name="debug",
    help="Collect data for a bug report.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_WIDTH = max(len(one.value) for one in Verdict)


@app.callback()
def _group() -> None:
    """Keep `bundle` a sub-command, though it is the only one."""


@command(app, "engine", "router", "scheduler", "worker", "handoff", "security", of=Of.ONE)
def bundle(
    settings: Settings,
    out: Annotated[
        str, typer.Option(help="The archive to write. [default: baton-debug-TIME.tar.gz]", metavar="FILE")
    ] = "",
    log_dir: Annotated[
        str, typer.Option(help="Folder of the logs, as given to `baton up`.", metavar="FOLDER")
    ] = "",
) -> None:
    """Write an archive for a bug report: versions, configuration, status, metrics, ends of logs.

    Secrets in the configuration and the environment are left out. Review the archive before you send it: logs
    may contain private data.
    """
    from baton.services.diagnosis.bundle import write

    path = Path(out or f"baton-debug-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if log_dir and not Path(log_dir).is_dir():
        raise ConfigError(f"--log-dir {log_dir}: there is no such folder")
    try:
        names = write(settings, path, log_dir)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror or error}") from None
    print(f"{path}: {', '.join(names)}")


def run_doctor(models: Sequence[Model], *, as_json: bool) -> None:
    """Print each model's findings as they are made; exit with status 1 if something is wrong."""
    found = []
    for model in models:
        if model.entry is not None and not as_json:
            print(f"model {model.name}", flush=True)
        found += asyncio.run(_findings(model.settings, show=not as_json))
    count = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    if as_json:
        counts = {verdict.value: number for verdict, number in count.items()}
        print(json.dumps({"findings": [one.as_json() for one in found], **counts}, indent=2))
    else:
        print("\n" + ", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    if count[Verdict.WRONG]:
        sys.exit(1)


async def _findings(settings: Settings, *, show: bool) -> list[Finding]:
    from baton.services.diagnosis.doctor import examine  # late: imports the router's modules

    found = []
    async for one in examine(settings):
        found.append(one)
        if show:
            print(line(one), flush=True)
    return found


def line(one: Finding) -> str:
    """Return a finding as text, with the advice on a second line."""
    text = f"{one.verdict:<{_WIDTH}}  {one.area}, {one.subject}: {one.what}"
    return f"{text}\n{'':<{_WIDTH}}  -> {one.todo}" if one.todo else text
