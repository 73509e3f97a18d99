"""`from baton import pipeline`: a list of prompts in, a list of responses out."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

from baton.services.config import Settings, keys, load
from baton.services.errors import ConfigError
from baton.services.fleet.supervisor import Fleet
from baton.services.offline.client import Client, Endpoint, each
from baton.services.offline.deployment import OwnDeployment
from baton.services.offline.errors import RequestError
from baton.services.offline.progress import Progress
from baton.services.offline.prompts import Options, Prompt, Request, as_list, requests
from baton.services.offline.responses import Piece, Response, pieces, response

_WAITING_PIECES = 4096  # of a stream, for who reads it; then the streams wait
_CLOSE_S = 10.0
# What a pipeline must choose itself, to be nobody else's.
_OURS = (
    ("router", "host"),
    ("router", "port"),
    ("router", "api_key"),
    ("router", "api_key_file"),
    ("scheduler", "address"),
    ("scheduler", "store"),
    ("scheduler", "store_password_file"),
)

T = TypeVar("T")


def pipeline(
    model: str | Path = "",
    *,
    prefill: int = 0,
    decode: int = 0,
    mixed: int | None = None,
    config: str | Path | None = None,
    concurrency: int | None = None,
    progress: bool = True,
    log_dir: str | Path = "",
    **settings: Any,
) -> Pipeline:
    """Start a deployment of one's own and return what answers prompts by it. Blocks until it is ready.

    `model`: folder or name; the configuration's where it is not given.
    `prefill`, `decode`, `mixed`: workers of each role, as of `baton up`; one mixed worker where none is
    given.
    `config`: a YAML file, as of `--config`. `settings`: keys of its engine section (`dtype="float32"`,
    `speculative_config={...}`), or whole sections as dicts (`handoff={...}`); they stand above the file and
    the environment. Ports, store and API key are not to be set: a pipeline is nobody else's.
    `concurrency`: requests under way at a time; as many as the workers batch by default.
    `progress`: tell on stderr how far the start and the answers are.
    `log_dir`: the logs of the processes; else they are kept only if something failed.

    The call's form is that of LMDeploy's `pipeline` and vLLM's `LLM`.
    Raises ConfigError or StartError with the reason when the engines cannot start.
    """
    fleet = fleet_of(prefill, decode, mixed)
    loaded = _load(str(model), config, settings)
    return Pipeline(loaded, fleet, concurrency=concurrency, progress=progress, log_dir=str(log_dir))


class Pipeline:
    """A running deployment that answers prompts. Several threads may use it. Close it, or use it in `with`.

    Left open, it is closed when it is collected or the interpreter ends; and if this process is killed, its
    deployment ends too.
    """

    def __init__(
        self, settings: Settings, fleet: Fleet, *, concurrency: int | None, progress: bool, log_dir: str
    ) -> None:
        fleet.check()
        at_once = default_concurrency(settings, fleet) if concurrency is None else concurrency
        if at_once < 1:
            raise ConfigError(f"concurrency: {at_once} is not allowed; at least 1")
        self._progress = progress
        self._deployment = OwnDeployment(settings, fleet, log_dir=log_dir, tell=_say if progress else _ignore)
        own = self._deployment
        endpoint = Endpoint(own.url, own.api_key, settings.router.request_timeout_s, own.check)
        self._loop = _Loop()
        self._client = self._loop.run(_make(endpoint, at_once))
        self._close = weakref.finalize(self, _close, self._loop, self._client, own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def deployment(self) -> OwnDeployment:
        """Its address, logs and process id."""
        return self._deployment

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a text is also a sequence of texts
        self, prompts: Prompt, **options: Unpack[Options]
    ) -> Response: ...
    @overload
    def __call__(self, prompts: Iterable[Prompt], **options: Unpack[Options]) -> list[Response]: ...
    def __call__(
        self, prompts: Prompt | Iterable[Prompt], **options: Unpack[Options]
    ) -> Response | list[Response]:
        """Answer one prompt, or several, in their order.

        A text or a list of token ids is continued, a list of messages answered as a chat. A prompt that fails
        has a Response with an `error`; the others are not concerned.
        Raises ConfigError for an unknown option, DeploymentEnded when the deployment is gone, Unavailable
        when it answers nothing for two minutes.
        """
        given, single = as_list(prompts)
        asked = self._requests(given, options)
        with Progress(len(asked), quiet=not self._progress or single or not sys.stderr.isatty()) as shown:
            found = self._loop.run(_answer(self._client, asked, shown))
        return found[0] if single else found

    def stream(self, prompts: Prompt | Iterable[Prompt], **options: Unpack[Options]) -> Iterator[Piece]:
        """The same, piece by piece as the answers are written; pieces of different prompts are mixed.

        Leaving the loop early ends the requests.
        """
        asked = self._requests(as_list(prompts)[0], options)
        streams = self._loop.run(_streams(self._client, asked))
        try:
            while batch := self._loop.run(streams.batch()):
                yield from batch
        finally:
            if not self._loop.closed:
                self._loop.run(streams.stop())

    def close(self) -> None:
        """End the deployment; returns when no process is left. Again is no harm."""
        self._close()

    def _requests(self, prompts: list[Prompt], options: Options) -> list[Request]:
        self._deployment.check()
        return requests(prompts, self._deployment.model, options)


def fleet_of(prefill: int | None, decode: int | None, mixed: int | None) -> Fleet:
    """Offline, nobody waits for a first token: one aggregated worker where nothing else is asked for."""
    alone = 0 if prefill or decode else 1
    return Fleet(prefill or 0, decode or 0, alone if mixed is None else mixed)


def default_concurrency(settings: Settings, fleet: Fleet) -> int:
    """Enough to fill every batch; while prefill workers read, decode workers write."""
    return settings.engine.max_num_seqs * (fleet.mixed + fleet.decode)


class _Loop:
    """An event loop in a thread of its own: the caller's thread may have one already, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton pipeline", daemon=True)
        self._thread.start()

    @property
    def is_mine(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.current_thread() is self._thread

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. An exception in this thread meanwhile, as by Ctrl-C, cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all that runs, end the thread."""
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_CLOSE_S) if others else None


def _close(loop: _Loop, client: Client, deployment: OwnDeployment) -> None:
    if os.getpid() != deployment.owner:  # in a fork there is no thread that runs the loop
        return
    if loop.is_mine:  # the collector found the pipeline here: this thread cannot wait for itself
        threading.Thread(target=_close, args=(loop, client, deployment), name="baton close").start()
        return
    try:
        loop.run(client.close())
        loop.close()
    finally:
        deployment.close()


async def _make(endpoint: Endpoint, concurrency: int) -> Client:
    return Client(endpoint, concurrency)


async def _answer(client: Client, asked: list[Request], shown: Progress) -> list[Response]:
    found: dict[int, Response] = {}

    async def ask(one: tuple[int, Request]) -> None:
        index, request = one
        try:
            answer = await client.post(request.path, request.body)
            found[index] = (
                response(index, answer.body) if answer.ok else Response(index, error=answer.error())
            )
        except RequestError as error:
            found[index] = Response(index, error=error)
        shown.count(found[index].completion_tokens, failed=found[index].error is not None)

    await each(enumerate(asked), ask, min(client.concurrency, len(asked)))
    return [found[index] for index in range(len(asked))]


async def _streams(client: Client, asked: list[Request]) -> _Streams:
    return _Streams(client, asked)


class _Streams:
    """Streams under way and what came of them. All of it runs in the loop."""

    def __init__(self, client: Client, asked: list[Request]) -> None:
        self._client = client
        self._waiting: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_WAITING_PIECES)
        self._asking = asyncio.create_task(self._ask_all(asked))

    async def batch(self) -> list[Piece]:
        """All that is there, so that the reader's thread is woken once for it; nothing at the end.

        Raises what ended all of the streams.
        """
        batch: list[Piece] = []
        while not batch or not self._waiting.empty():
            item = await self._waiting.get()
            if item is None:
                if batch:
                    self._waiting.put_nowait(None)  # for the next call
                break
            if isinstance(item, Exception):
                raise item
            batch.append(item)
        return batch

    async def stop(self) -> None:
        self._asking.cancel()
        await asyncio.wait([self._asking])

    async def _ask_all(self, asked: list[Request]) -> None:
        end: Exception | None = None
        try:
            await each(enumerate(asked), self._ask, min(self._client.concurrency, len(asked)))
        except Exception as error:  # noqa: BLE001 (raised where the pieces are read)
            end = error
        await self._waiting.put(end)

    async def _ask(self, one: tuple[int, Request]) -> None:
        index, request = one
        try:
            async for event in self._client.stream(request.path, request.body):
                for piece in pieces(index, event):
                    await self._waiting.put(piece)
        except RequestError as error:
            await self._waiting.put(Piece(index, 0, "", [], error=error))


def _load(model: str, config: str | Path | None, settings: dict[str, Any]) -> Settings:
    sections: dict[str, dict[str, Any]] = {"engine": {"model": model or None}}
    for name, value in settings.items():
        if not keys(name):
            sections["engine"][name] = value
        elif isinstance(value, dict):
            sections.setdefault(name, {}).update(value)
        else:
            raise ConfigError(f"{name} is not allowed: a section is a dict of its keys")
    for section, key in _OURS:
        if key in sections.get(section, {}):
            raise ConfigError(f"{section}.{key} is not for you to set: a pipeline chooses its own")
    return load(sections, None if config is None else str(config))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ignore(line: str) -> None:
    del line
