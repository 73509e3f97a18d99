"""Manage the streams to all workers: open them when first needed, and check them for silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.keeping import keep
from baton.protos import scheduler_pb2, worker_pb2
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.stream import CHECKS, WorkerStream
from baton.tasks import spawn_apart

SUSPECT_S = 5.0  # a lost worker is avoided this long: until then the scheduler has noticed too
# A lost worker that the scheduler still hears of may be cut off only from this router. The pool itself tries
# to reach it again for this long, and it stays avoided meanwhile, so that no request has to find out.
PROBED_S = 60.0
SILENCE_S = 5.0  # default; a stream that is silent for this long is lost


@dataclass
class _Suspect:
    """A worker that was lost or cannot be reached. Times are time.monotonic."""

    worker: scheduler_pb2.Worker
    since: float
    until: float


class WorkerPool:
    """The streams by worker. A restarted worker has a new id, and so a new stream."""

    def __init__(
        self,
        hello: worker_pb2.HelloRequest,
        decode_outputs: Callable[[bytes], Any],
        silence_s: float = SILENCE_S,
    ) -> None:
        """Treat a worker whose stream is silent for `silence_s` as lost.

        That should be several of the intervals at which idle workers send (scheduler.heartbeat_s).
        """
        self._hello = hello
        self._decode_outputs = decode_outputs
        self._silence_s = silence_s
        self._checking: asyncio.Task[None] | None = None
        self._streams: dict[str, WorkerStream] = {}
        self._opening: dict[str, asyncio.Task[WorkerStream]] = {}
        self._suspects: dict[str, _Suspect] = {}  # keyed by worker id
        self._closed = False

    def reach(
        self, worker: scheduler_pb2.Worker, then: Callable[[WorkerStream | WorkerUnreachable], None]
    ) -> None:
        """Call `then` with the open stream to `worker`: at once if there is one, else once it is open.

        If it cannot be opened, `then` gets the reason, within a call's deadline.
        """
        stream = self._streams.get(worker.worker_id)
        if stream is not None:
            then(stream)
        elif self._closed:
            then(WorkerUnreachable("the router is shutting down"))
        else:
            opening = self._connecting(worker)  # others wait for it too
            opening.add_done_callback(lambda task: then(_stream_of(task)))

    def opened(self, worker_id: str) -> WorkerStream | None:
        return self._streams.get(worker_id)

    def abort(self, worker_id: str, request_id: str) -> None:
        """Have a worker drop a request; do nothing without an open stream to it."""
        if stream := self._streams.get(worker_id):
            stream.abort(request_id)

    def suspects(self) -> set[str]:
        """Return the ids of workers whose stream broke a moment ago and which have not been reached since."""
        now = time.monotonic()
        self._suspects = {
            worker: one
            for worker, one in self._suspects.items()
            if one.until > now or worker in self._opening  # the outcome will tell more in a moment
        }
        return set(self._suspects)

    def reached(self) -> set[str]:
        """Return the ids of workers from which messages come."""
        return set(self._streams)

    def lag_s(self) -> float:
        """Return how late the slowest stream is read, seconds: the router's own backlog."""
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

    def _connecting(self, worker: scheduler_pb2.Worker) -> asyncio.Task[WorkerStream]:
        task = self._opening.get(worker.worker_id)
        if task is None:
            task = spawn_apart(self._open(worker), f"open {worker.worker_id}")
            self._opening[worker.worker_id] = task
            task.add_done_callback(lambda task: self._opened(worker.worker_id, task))
        return task

    async def _open(self, worker: scheduler_pb2.Worker) -> WorkerStream:
        stream = WorkerStream(worker, self._decode_outputs, self._ended)
        try:
            await stream.open(self._hello)
        except WorkerUnreachable:
            self._suspect(worker)
            raise
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

    def _opened(self, worker_id: str, task: asyncio.Task[WorkerStream]) -> None:
        self._opening.pop(worker_id, None)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would complain if nobody waits for it

    def _ended(self, stream: WorkerStream, lost: bool) -> None:
        if self._streams.get(stream.worker_id) is stream:
            del self._streams[stream.worker_id]
        if lost:
            self._suspect(stream.worker)

    def _suspect(self, worker: scheduler_pb2.Worker) -> None:
        now = time.monotonic()
        known = self._suspects.get(worker.worker_id)
        since = known.since if known and now < known.since + PROBED_S else now
        self._suspects[worker.worker_id] = _Suspect(worker, since, now + SUSPECT_S)
        self._begin_checks()


def _stream_of(task: asyncio.Task[WorkerStream]) -> WorkerStream | WorkerUnreachable:
    """Return the outcome of a task that opened a stream."""
    if task.cancelled():
        return WorkerUnreachable("the router is shutting down")
    error = task.exception()
    if error is None:
        return task.result()
    return error if isinstance(error, WorkerUnreachable) else WorkerUnreachable(repr(error))
