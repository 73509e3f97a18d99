"""Manage the streams to all workers: open each when first needed, and close streams that fall silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.enums import role_name
from baton.keeping import keep
from baton.protos import scheduler_pb2, worker_pb2
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.worker_stream import CHECKS, WorkerStream
from baton.tasks import spawn_apart

SUSPECT_S = 5.0  # a lost worker is avoided for this long; by then the scheduler knows, too
# A worker may be cut off from this router only. The pool tries to reconnect for this long, at no cost to
# requests, which avoid the worker until this succeeds.
PROBED_S = 60.0
_CLOSED = WorkerUnreachable("the router is shutting down")
SILENCE_S = 5.0  # default; a stream that is silent for this long is lost


@dataclass
class _Suspect:
    """A worker that was lost or cannot be reached; times are time.monotonic."""

    worker: scheduler_pb2.Worker
    since: float
    until: float
    gang: str  # empty once the worker could not be reached again: its gang may be healthy


class WorkerPool:
    """The streams by worker id. A restarted worker has a new id."""

    def __init__(
        self,
        hello: worker_pb2.HelloRequest,
        decode_outputs: Callable[[bytes], Any],
        on_image: Callable[[str, int], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """on_image: called with the role of a worker that is sent an image, and the image's size in bytes.

        silence_s: after this long without a message a worker is lost. It should be several times
        scheduler.heartbeat_s, the interval at which idle workers send.
        """
        self._hello = hello
        self._decode_outputs = decode_outputs
        self._on_image = on_image
        self._silence_s = silence_s
        self._checking: asyncio.Task[None] | None = None
        self._streams: dict[str, WorkerStream] = {}
        self._opening: dict[str, asyncio.Task[WorkerStream | WorkerUnreachable]] = {}
        self._suspects: dict[str, _Suspect] = {}  # keyed by worker id
        self._closed = False

    def reach(
        self, worker: scheduler_pb2.Worker, then: Callable[[WorkerStream | WorkerUnreachable], None]
    ) -> None:
        """Call `then` with the stream to `worker` once it is open, or with the error.

        The call is made at once if there is a stream, else within the connect deadline.
        """
        stream = self._streams.get(worker.worker_id)
        if stream is not None:
            then(stream)
        elif self._closed:
            then(_CLOSED)
        else:
            opening = self._connecting(worker)
            opening.add_done_callback(lambda task: then(_CLOSED if task.cancelled() else task.result()))

    def opened(self, worker_id: str) -> WorkerStream | None:
        return self._streams.get(worker_id)

    def abort(self, worker_id: str, request_id: str) -> None:
        """Abort a request at a worker if there is a stream to it."""
        if stream := self._streams.get(worker_id):
            stream.abort(request_id)

    def suspects(self) -> set[str]:
        """Return the ids of workers that were lost recently and have not been reached since.

        The other workers of a lost worker's gang count, too: they are about to end.
        """
        now = time.monotonic()
        self._suspects = {
            worker: one
            for worker, one in self._suspects.items()
            if one.until > now or worker in self._opening
        }
        gangs = {one.gang for one in self._suspects.values() if one.gang}
        others = (worker for worker, one in self._streams.items() if one.gang in gangs) if gangs else ()
        return {*self._suspects, *others}

    def reached(self) -> set[str]:
        return set(self._streams)

    def lag_s(self) -> float:
        """Return how many seconds the router is behind in reading its slowest stream."""
        now = time.monotonic()
        return max((stream.lag_s(now) for stream in self._streams.values()), default=0.0)

    async def close(self) -> None:
        """End all streams, within the connect deadline."""
        self._closed = True
        if self._checking is not None:
            self._checking.cancel()
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*(stream.close() for stream in list(self._streams.values())))

    def _connecting(self, worker: scheduler_pb2.Worker) -> asyncio.Task[WorkerStream | WorkerUnreachable]:
        task = self._opening.get(worker.worker_id)
        if task is None:
            task = spawn_apart(self._open(worker), f"open {worker.worker_id}")
            self._opening[worker.worker_id] = task
            task.add_done_callback(lambda _: self._opening.pop(worker.worker_id, None))
        return task

    async def _open(self, worker: scheduler_pb2.Worker) -> WorkerStream | WorkerUnreachable:
        role = role_name(worker.role)
        stream = WorkerStream(
            worker, self._decode_outputs, self._ended, lambda image: self._on_image(role, image.size)
        )
        try:
            await stream.open(self._hello)
        except WorkerUnreachable as error:
            self._suspect(worker)
            return error
        except Exception as error:  # noqa: BLE001 (a bug must not leave requests waiting)
            return WorkerUnreachable(repr(error))
        self._suspects.pop(worker.worker_id, None)
        self._streams[worker.worker_id] = stream
        self._begin_checks()
        return stream

    def _begin_checks(self) -> None:
        if self._checking is None and not self._closed:
            self._checking = keep(self._check, "check streams and suspects")

    async def _check(self) -> None:
        interval_s = self._silence_s / CHECKS
        while True:
            await asyncio.sleep(interval_s)
            for stream in list(self._streams.values()):
                stream.check_silence(self._silence_s)
            now = time.monotonic()
            for one in self._suspects.values():
                if one.until < now + 2 * interval_s and now < one.since + PROBED_S:
                    self._connecting(one.worker)

    def _ended(self, stream: WorkerStream, lost: bool) -> None:
        if self._streams.get(stream.worker_id) is stream:
            del self._streams[stream.worker_id]
        if lost:
            self._suspect(stream.worker, stream.gang)
            for other in list(self._streams.values()) if stream.gang else ():
                if other.gang == stream.gang:  # the other worker may be hanging: its gang noticed that first
                    other.gang_ended()

    def _suspect(self, worker: scheduler_pb2.Worker, gang: str = "") -> None:
        now = time.monotonic()
        known = self._suspects.get(worker.worker_id)
        since = known.since if known and now < known.since + PROBED_S else now
        self._suspects[worker.worker_id] = _Suspect(worker, since, now + SUSPECT_S, gang)
        self._begin_checks()
