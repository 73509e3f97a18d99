"""`baton batch`: every request of a file is answered once, however often it has to be started again."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from baton.services.config import Settings
from baton.services.engine.args import check_model, served_model_name
from baton.services.fleet.supervisor import Fleet
from baton.services.offline import batch_file
from baton.services.offline.batch_file import Item, Output
from baton.services.offline.client import Answer, Client, Endpoint, each
from baton.services.offline.deployment import OwnDeployment
from baton.services.offline.errors import DeploymentEnded, InputError, RequestError, Unavailable
from baton.services.offline.progress import Progress

URL_CONCURRENCY = 64  # requests under way at a deployment of unknown size; it refuses what is too much
INTERRUPTED = 130


@dataclass(frozen=True)
class Source:
    """Who answers: the names it serves, and how to get there (nothing is started before)."""

    served: list[str]
    open: Callable[[], AbstractContextManager[Endpoint]]
    concurrency: int


def own_deployment(settings: Settings, fleet: Fleet, concurrency: int, log_dir: str) -> Source:
    """A deployment that is started for the batch. Raises ConfigError for what can be seen before."""
    fleet.check()
    check_model(settings.engine)

    def start() -> AbstractContextManager[Endpoint]:
        return _Started(settings, fleet, log_dir)

    return Source([served_model_name(settings.engine)], start, concurrency)


def running_deployment(endpoint: Endpoint, concurrency: int) -> Source:
    """One that runs already. Raises Unavailable, RequestError when it does not answer."""

    async def ask() -> list[str]:
        async with Client(endpoint, 1) as client:
            return await client.models()

    return Source(asyncio.run(ask()), lambda: nullcontext(endpoint), concurrency)


def run_batch(source: Source, requests: Path, answers: Path) -> int:
    """Answer all requests that have no answer yet. Exit status: 0, 1 if some failed, 130 if interrupted.

    Raises InputError for a file that is wrong, before anything is started; StartError or ConfigError when the
    deployment cannot start; Unavailable or DeploymentEnded when it is lost. What was answered stays.
    """
    if requests.exists() and answers.exists() and requests.samefile(answers):
        raise InputError(f"{requests} cannot be both the requests and the answers")
    ids = batch_file.check(requests, source.served)
    with Output.resume(answers, ids) as output:
        done, total = len(output.done), len(ids)
        if done:
            _say(f"  {done} of {total} are answered in {answers} already")
        if done == total:
            return _sum_up(output.failed, total, "nothing was left to do", answers)
        shown: Progress | None = None
        try:
            with source.open() as endpoint, Progress(total, done=done) as shown:
                asyncio.run(_answer(endpoint, source.concurrency, requests, output, shown))
        except (KeyboardInterrupt, asyncio.CancelledError):
            _say(f"  interrupted: {_so_far(shown, done, total)}")
            return INTERRUPTED
        except (Unavailable, DeploymentEnded) as error:
            raise type(error)(f"{error}; {_so_far(shown, done, total)}") from None
        took = f"in {shown.elapsed_s:.1f} s, {shown.tokens} tokens, {shown.tokens / shown.elapsed_s:.0f}/s"
        return _sum_up(output.failed + shown.failed, total, took, answers)


class _Started(AbstractContextManager[Endpoint]):
    """The own deployment, from when it is ready until the batch is done."""

    def __init__(self, settings: Settings, fleet: Fleet, log_dir: str) -> None:
        self._arguments = (settings, fleet, log_dir)

    def __enter__(self) -> Endpoint:
        settings, fleet, log_dir = self._arguments
        _say(f"  starting {fleet} for {served_model_name(settings.engine)}")
        self._own = OwnDeployment(settings, fleet, log_dir=log_dir, tell=_say)
        return Endpoint(self._own.url, self._own.api_key, settings.router.request_timeout_s, self._own.check)

    def __exit__(self, *exc: object) -> None:
        self._own.close()


async def _answer(
    endpoint: Endpoint, concurrency: int, requests: Path, output: Output, shown: Progress
) -> None:
    this = asyncio.current_task()
    if this is not None:  # SIGINT does the same
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    async with Client(endpoint, concurrency) as client:

        async def ask(item: Item) -> None:
            result: Answer | RequestError
            try:
                result = await client.post(item.url, item.body)
            except RequestError as error:
                result = error
            good = output.write(item.custom_id, result)
            usage = result.body.get("usage") if isinstance(result, Answer) else None
            shown.count((usage or {}).get("completion_tokens") or 0, failed=not good)

        await each(batch_file.read(requests, output.done), ask, concurrency)


def _sum_up(failed: int, total: int, how: str, answers: Path) -> int:
    _say(f"  {total} answered, {failed} of them with an error, {how}: {answers}")
    return 1 if failed else 0


def _so_far(shown: Progress | None, done: int, total: int) -> str:
    now = shown.done if shown else done
    return f"{now} of {total} are answered; the same command goes on from there"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
