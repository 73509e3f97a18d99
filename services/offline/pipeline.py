"""Offline use from Python, `from baton import pipeline`: a list of prompts in, a list of responses out."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

from baton.services.config import Settings, keys, load
from baton.services.errors import ConfigError
from baton.services.fleet.supervisor import Fleet
from baton.services.offline.client import Client, Endpoint, each
from baton.services.offline.deployment import OwnDeployment
from baton.services.offline.errors import RequestError
from baton.services.offline.progress import Progress
from baton.services.offline.prompts import (
    Options,
    Piece,
    Prompt,
    Request,
    Response,
    as_list,
    pieces,
    requests,
    response,
)
from baton.services.printing import complain

_WAITING_PIECES = 4096  # received but not yet consumed; at this limit the streams wait
_CLOSE_S = 10.0
# (section, key) of settings that a pipeline chooses itself, because its deployment is private.
_OURS = (
    ("router", "host"),
    ("router", "port"),
    ("router", "api_key"),
    ("router", "keys_file"),
    ("router", "keys_store"),
    ("scheduler", "address"),
    ("scheduler", "store"),
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
    """Start a private deployment and return a Pipeline on it. Blocks until the deployment is ready.

    `model`: folder or name; by default the configuration's.
    `prefill`, `decode`, `mixed`: number of workers of each role, as for `baton up`; by default one mixed
    worker.
    `config`: a YAML file, as for `--config`.
    `settings`: keys of the engine section (`dtype="float32"`, `speculative_config={...}`), or whole sections
    as dicts (`handoff={...}`); they take precedence over the file and the environment. Ports, store and API
    key cannot be set: the deployment is private.
    `concurrency`: maximum number of requests in flight; by default as many as the workers batch.
    `progress`: show the progress of the start and of the requests on stderr.
    `log_dir`: folder for the processes' logs; without it they are kept only after a failure.

    The signature resembles LMDeploy's `pipeline` and vLLM's `LLM`.
    Raises ConfigError or StartError if the engines cannot start.
    """
    fleet = fleet_of(prefill, decode, mixed)
    loaded = _load(str(model), config, settings)
    return Pipeline(loaded, fleet, concurrency=concurrency, progress=progress, log_dir=str(log_dir))


class Pipeline:
    """A running deployment to send prompts to, from any thread. Close it, or use it in `with`.

    Otherwise it is closed when it is garbage-collected or when the interpreter exits. If this process is
    killed, its deployment ends too.
    """

    def __init__(
        self, settings: Settings, fleet: Fleet, *, concurrency: int | None, progress: bool, log_dir: str
    ) -> None:
        fleet.check()
        at_once = default_concurrency(settings, fleet) if concurrency is None else concurrency
        if at_once < 1:
            raise ConfigError(f"concurrency: {at_once} is not allowed; at least 1")
        self._progress = progress
        tell: Callable[[str], None] = complain if progress else lambda _: None
        own = self.deployment = OwnDeployment(settings, fleet, log_dir=log_dir, tell=tell)
        endpoint = Endpoint(own.url, settings.router.request_timeout_s, own.api_key, own.check)
        self._loop = _Loop()
        self._client = self._loop.run(_make(endpoint, at_once))
        self._close = weakref.finalize(self, _close, self._loop, self._client, own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a text is also a sequence of texts
        self, prompts: Prompt, **options: Unpack[Options]
    ) -> Response: ...
    @overload
    def __call__(self, prompts: Iterable[Prompt], **options: Unpack[Options]) -> list[Response]: ...
    def __call__(
        self, prompts: Prompt | Iterable[Prompt], **options: Unpack[Options]
    ) -> Response | list[Response]:
        """Run one prompt, or several, and return the responses in the order of the prompts.

        A text or a list of token ids is completed, a list of messages is a chat. A prompt that fails gets a
        Response with an `error`; the others continue.
        Raises ConfigError for an unknown option, DeploymentEnded if the deployment has ended, Unavailable if
        it responds to nothing for two minutes.
        """
        given, single = as_list(prompts)
        asked = self._requests(given, options)
        with Progress(len(asked), quiet=not self._progress or single or not sys.stderr.isatty()) as shown:
            found = self._loop.run(_run(self._client, asked, shown))
        return found[0] if single else found

    def stream(self, prompts: Prompt | Iterable[Prompt], **options: Unpack[Options]) -> Iterator[Piece]:
        """Run prompts and yield pieces of all their outputs as they are generated.

        Closing the iterator early aborts the requests. Raises like `__call__`.
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
        """Stop the deployment and wait until no process is left. Idempotent."""
        self._close()

    def _requests(self, prompts: list[Prompt], options: Options) -> list[Request]:
        self.deployment.check()
        return requests(prompts, self.deployment.model, options)


def fleet_of(prefill: int, decode: int, mixed: int | None) -> Fleet:
    """Return the fleet, by default one mixed worker: time to first token matters little offline."""
    alone = 0 if prefill or decode else 1
    return Fleet(prefill, decode, alone if mixed is None else mixed)


def default_concurrency(settings: Settings, fleet: Fleet) -> int:
    """Return the number of requests that fills the batches of all decoding workers."""
    return settings.engine.max_num_seqs * (fleet.mixed + fleet.decode)


class _Loop:
    """An event loop in its own thread: the caller's thread may have one already, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton pipeline", daemon=True)
        self._thread.start()

    @property
    def is_mine(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and return its result. Ctrl-C and other exceptions cancel it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
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
    if os.getpid() != deployment.owner:  # a fork has no thread that runs the loop
        return
    if loop.is_mine:  # garbage-collected in this thread, which cannot wait for itself
        threading.Thread(target=_close, args=(loop, client, deployment), name="baton close").start()
        return
    try:
        loop.run(client.close())
        loop.close()
    finally:
        deployment.close()


async def _make(endpoint: Endpoint, concurrency: int) -> Client:
    return Client(endpoint, concurrency)


async def _run(client: Client, asked: list[Request], shown: Progress) -> list[Response]:
    found: dict[int, Response] = {}

    async def ask(one: tuple[int, Request]) -> None:
        index, request = one
        try:
            got = await client.post(request.path, request.body)
            found[index] = response(index, got.body) if got.ok else Response(index, error=got.error())
        except RequestError as error:
            found[index] = Response(index, error=error)
        shown.count(found[index].completion_tokens, failed=found[index].error is not None)

    await each(enumerate(asked), ask, min(client.concurrency, len(asked)))
    return [found[index] for index in range(len(asked))]


async def _streams(client: Client, asked: list[Request]) -> _Streams:
    return _Streams(client, asked)


class _Streams:
    def __init__(self, client: Client, asked: list[Request]) -> None:
        self._client = client
        self._waiting: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_WAITING_PIECES)
        self._asking = asyncio.create_task(self._ask_all(asked))

    async def batch(self) -> list[Piece]:
        """Wait for a piece and return all that have arrived, or [] at the end.

        Raises the exception that ended the streams.
        """
        batch: list[Piece] = []
        while not batch or not self._waiting.empty():
            item = await self._waiting.get()
            if item is None:
                if batch:
                    self._waiting.put_nowait(None)  # the next call needs it
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
        except Exception as error:  # noqa: BLE001 (raised by `batch`)
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
            raise ConfigError(f"{name} is a section: give a dict of its keys")
    for section, key in _OURS:
        if key in sections.get(section, {}):
            raise ConfigError(f"{section}.{key} cannot be set: a pipeline chooses its own")
    loaded: Settings = load(sections, None if config is None else str(config))
    if loaded.models:
        raise ConfigError("models: a pipeline serves one model; give it a configuration without that section")
    return loaded
