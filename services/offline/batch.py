"""Run `baton batch`: each request of a file gets one result, however often the batch is restarted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from baton import signals
from baton.services.config import Settings
from baton.services.engine.args import check_model, served_model_name, served_names
from baton.services.fleet.supervisor import Fleet
from baton.services.offline import batch_file
from baton.services.offline.batch_file import Item, Output
from baton.services.offline.client import Client, Endpoint, HttpResponse, each
from baton.services.offline.deployment import OwnDeployment
from baton.services.offline.errors import DeploymentEnded, InputError, RequestError, Unavailable
from baton.services.offline.progress import Progress
from baton.services.printing import complain

URL_CONCURRENCY = (
    64  # requests in flight at a deployment of unknown size, which refuses more than it can hold
)
INTERRUPTED = 130


@dataclass(frozen=True)
class Source:
    served: list[str]  # model names
    open: Callable[[], AbstractContextManager[Endpoint]]  # starts the deployment if needed
    concurrency: int


def own_deployment(settings: Settings, fleet: Fleet, concurrency: int, log_dir: str) -> Source:
    """Describe a deployment to be started for the batch. Raises ConfigError if it could not start."""
    fleet.check()
    check_model(settings.engine)

    @contextmanager
    def start() -> Iterator[Endpoint]:
        complain(f"  starting {fleet} for {served_model_name(settings.engine)}")
        with OwnDeployment(settings, fleet, log_dir=log_dir, tell=complain) as own:
            yield Endpoint(own.url, settings.router.request_timeout_s, own.api_key, own.check)

    return Source(served_names(settings.engine), start, concurrency)


def running_deployment(endpoint: Endpoint, concurrency: int) -> Source:
    """Describe a running deployment from its own list of models. Raises Unavailable, RequestError."""

    async def ask() -> list[str]:
        async with Client(endpoint, 1) as client:
            return await client.models()

    return Source(asyncio.run(ask()), lambda: nullcontext(endpoint), concurrency)


def run_batch(source: Source, requests: Path, results: Path) -> int:
    """Run the requests that have no result yet. Return the exit status: 0, 1 if some failed, 130 on Ctrl-C.

    Raises InputError for an invalid file, before anything is started; StartError or ConfigError if the
    deployment cannot start; Unavailable or DeploymentEnded if it is lost. Results written so far are kept.
    """
    if requests.exists() and results.exists() and requests.samefile(results):
        raise InputError(f"{requests} cannot be both the requests and the results")
    ids = batch_file.check(requests, source.served)
    with Output.resume(results, ids) as output:
        done, total = len(output.done), len(ids)
        if done:
            complain(f"  {done} of {total} already have a result in {results}")
        if done == total:
            return _sum_up(output.failed, total, "nothing left to do", results)
        shown: Progress | None = None
        try:
            with source.open() as endpoint, Progress(total, done=done) as shown:
                asyncio.run(_run(endpoint, source.concurrency, requests, output, shown))
        except (KeyboardInterrupt, asyncio.CancelledError):
            complain(f"  interrupted: {_so_far(shown, done, total)}")
            return INTERRUPTED
        except (Unavailable, DeploymentEnded) as error:
            raise type(error)(f"{error}; {_so_far(shown, done, total)}") from None
        took = f"in {shown.elapsed_s:.1f} s, {shown.tokens} tokens, {shown.tokens / shown.elapsed_s:.0f}/s"
        return _sum_up(output.failed + shown.failed, total, took, results)


async def _run(endpoint: Endpoint, concurrency: int, requests: Path, output: Output, shown: Progress) -> None:
    this = asyncio.current_task()
    if this is not None:  # asyncio.run does the same for SIGINT
        for number in set(signals.ending()) - {signal.SIGINT}:
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    async with Client(endpoint, concurrency) as client:

        async def ask(item: Item) -> None:
            result: HttpResponse | RequestError
            try:
                result = await client.post(item.url, item.body)
            except RequestError as error:
                result = error
            succeeded = output.write(item.custom_id, result)
            usage = result.body.get("usage") if isinstance(result, HttpResponse) else None
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
            shown.count(tokens if isinstance(tokens, int) else 0, failed=not succeeded)

        await each(batch_file.read(requests, output.done), ask, concurrency)


def _sum_up(failed: int, total: int, how: str, results: Path) -> int:
    complain(f"  {total} done, {failed} of them failed, {how}: {results}")
    return 1 if failed else 0


def _so_far(shown: Progress | None, done: int, total: int) -> str:
    now = shown.done if shown else done
    return f"{now} of {total} are done; the same command resumes there"
