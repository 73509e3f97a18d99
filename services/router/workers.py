"""The streams to the workers: one a worker, opened when it is first needed, closed when idle or lost.

A stream is lost when it breaks, and when nothing comes for too long: workers send a sign of life where they
have nothing else to say, so that one that hangs, or a network that drops, is noticed as a death is.

Per token nothing here awaits and no task is woken but the stream's one reader: it hands each output to the
request's leg by a direct call. One writer task a stream, as concurrent writes end a grpc.aio stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc
import grpc.aio

from baton.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc import CALL_TIMEOUT_S, aio_channel
from baton.services.router.errors import WorkerUnreachable

log = logging.getLogger(__name__)

MAX_UNSENT_STARTS = 1024  # of one worker; above it the worker counts as full
CLOCK_DRIFT = 1e-4  # seconds a second: more than two hosts' clocks differ by
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # its stubs forget it
IDLE_CLOSE_S = 60.0  # a stream without requests is closed after this
SUSPECT_S = 5.0  # a lost worker is avoided this long: until then the scheduler has noticed too
SILENCE_S = 5.0  # unless told otherwise: a stream that is silent for this long is lost
LOOKS = 5  # at each stream, within that time
LAG_COUNTS_S = 0.25  # after its message: a stream that is behind has the next one within that time


class Leg(Protocol):
    """One phase of one attempt on one worker. The calls come from the stream's reader and must not block."""

    request_id: str
    epoch: int

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """One engine step's output. The offset leads from the worker's monotonic clock to ours."""

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """The prompt's KV cache waits to be pulled, or could not be kept."""

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """The KV cache was loaded; the request may wait for a slot still."""

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """The answer has begun; so many of its KV blocks are other requests' as well."""

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        """The attempt ended here without an answer."""

    def on_lost(self, message: str) -> None:
        """The stream ended under it."""


class WorkerStream:
    """One worker's Run stream. A leg that is not forgotten before the stream's end gets one `on_lost`."""

    def __init__(
        self,
        worker: scheduler_pb2.Worker,
        decode_outputs: Callable[[bytes], Any],
        on_end: Callable[[WorkerStream, bool], None],
    ) -> None:
        self.worker_id = worker.worker_id
        self.address = worker.address
        self._decode_outputs = decode_outputs
        self._on_end = on_end
        self._legs: dict[str, Leg] = {}
        self._pulled_from: dict[str, Callable[[str], None]] = {}  # by request id
        self._unsent: deque[worker_pb2.RunRequest] = deque()
        self._unsent_starts = 0
        self._something_unsent = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._idle_timer: asyncio.TimerHandle | None = None
        self._least_offset_s = math.inf  # from the worker's clock to ours, of the quickest message
        self._last_sent_at = 0.0  # the worker's clock
        self._heard = True  # since the last look
        self._silent_looks = 0
        self.ended = False
        self.speculative_method = ""  # by which it drafts, if it does
        self._lag_s = 0.0  # how much later than the quickest one the last message was read
        self._read_at = 0.0  # our clock

    async def open(self, hello: worker_pb2.HelloRequest) -> None:
        """Connect and compare versions and models. Raises WorkerUnreachable with one line that names both."""
        channel = aio_channel(self.address)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            reply = await stub.Hello(hello, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            await channel.close(None)
            raise WorkerUnreachable(
                f"worker {self.worker_id} at {self.address} does not answer: {error.details()}"
            ) from None
        except BaseException:
            await channel.close(None)
            raise
        if problem := self._refusal(reply):
            await channel.close(None)
            log.error("worker %s at %s cannot be used: %s", self.worker_id, self.address, problem)
            raise WorkerUnreachable(f"worker {self.worker_id}: {problem}")
        self._channel = channel
        self.speculative_method = reply.identity.capacity.speculative_method
        call = stub.Run()
        self._tasks = [
            asyncio.create_task(self._write(call), name=f"write {self.worker_id}"),
            asyncio.create_task(self._read(call), name=f"read {self.worker_id}"),
        ]
        self._rest()

    def _refusal(self, reply: worker_pb2.HelloReply) -> str:
        if reply.refusal:
            return reply.refusal
        there = reply.identity.worker_id
        if there and there != self.worker_id:
            return f"{self.address} is now worker {there}"
        return ""

    def begin(self, leg: Leg, start: worker_pb2.Start) -> bool:
        """Send `start`; what it brings goes to `leg`. False when the stream has ended or is clogged."""
        if self.ended or self._unsent_starts >= MAX_UNSENT_STARTS:
            return False
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._legs[leg.request_id] = leg
        self._unsent_starts += 1
        self._send(worker_pb2.RunRequest(start=start))
        return True

    def forget(self, leg: Leg) -> None:
        """What still comes for this leg is dropped. Harmless when it is gone already."""
        if self._legs.get(leg.request_id) is leg:
            del self._legs[leg.request_id]
            if not self._legs:
                self._rest()

    @contextlib.contextmanager
    def pulled_from(self, request_id: str, on_lost: Callable[[str], None]) -> Iterator[None]:
        """Inside the block what the worker saved of the request is pulled: `on_lost` hears if it is lost."""
        if self.ended:
            on_lost("its stream has ended")
        self._pulled_from[request_id] = on_lost
        try:
            yield
        finally:
            self._pulled_from.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Tell the worker to drop the request, its saved KV too. Goes out behind its Start."""
        if not self.ended:
            self._send(worker_pb2.RunRequest(abort=worker_pb2.Abort(request_ids=[request_id])))

    def lag_s(self, now: float) -> float:
        """How late this stream is read, seconds. One late message before a silence says nothing of now."""
        return self._lag_s if now < self._read_at + LAG_COUNTS_S else 0.0

    def look(self, silence_s: float) -> None:
        """Called LOOKS times in `silence_s`: give the stream up when it was silent all the time.

        Looks are counted, not seconds: those that this process slept through, with the messages unread, are
        no fault of the worker's.
        """
        self._silent_looks = 0 if self._heard else self._silent_looks + 1
        self._heard = False
        if self._silent_looks >= LOOKS and not self.ended:
            self._end(f"it was not heard of for {silence_s:g} s", lost=True)
            _detached(self.close())

    async def close(self) -> None:
        """End the stream; legs that are left are lost."""
        self._end("the router closes the connection", lost=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    def _send(self, message: worker_pb2.RunRequest) -> None:
        self._unsent.append(message)
        self._something_unsent.set()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._something_unsent.wait()
                self._something_unsent.clear()
                while self._unsent:
                    message = self._unsent.popleft()
                    if message.HasField("start"):
                        self._unsent_starts -= 1
                    await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, and why

    async def _read(self, call: Any) -> None:
        message = "the router failed to read its stream"
        try:
            while (reply := await call.read()) is not _EOF:
                self._heard = True
                self._dispatch(reply)
            code, details = await call.code(), await call.details()
            message = "it ended the stream" if code is grpc.StatusCode.OK else f"{code.name}: {details}"
        except grpc.aio.AioRpcError as error:
            message = f"{error.code().name}: {error.details()}"
        except ValueError as error:
            message = f"it sent what cannot be read: {error}"
        finally:
            call.cancel()
            if not self.ended:
                self._end(message, lost=True)
                _detached(self.close())  # another task's work: this one cannot wait for its own end

    def _dispatch(self, reply: worker_pb2.RunReply) -> None:
        legs = self._legs
        if reply.engine_outputs:
            outputs = self._decode_outputs(reply.engine_outputs)
            offset_s = time.monotonic() - outputs.timestamp
            self._note_lag(outputs.timestamp, offset_s)
            for output in outputs.outputs:
                leg = legs.get(output.request_id)
                if leg is not None:
                    leg.on_output(output, offset_s)
        for saved in reply.saved:
            if leg := self._current(saved.request_id, saved.epoch):
                leg.on_saved(saved)
        for admitted in reply.admitted:
            if leg := self._current(admitted.request_id, admitted.epoch):
                leg.on_admitted(admitted)
        for shared in reply.shared:
            if leg := self._current(shared.request_id, shared.epoch):
                leg.on_shared(shared)
        for failed in reply.failed:
            if leg := self._current(failed.request_id, failed.epoch):
                leg.on_failed(failed)

    def _note_lag(self, sent_at: float, offset_s: float) -> None:
        """Compare with the quickest message so far; the comparison fades, as hosts' clocks drift apart."""
        faded = self._least_offset_s + CLOCK_DRIFT * max(0.0, sent_at - self._last_sent_at)
        self._last_sent_at = sent_at
        self._least_offset_s = min(faded, offset_s)
        self._lag_s = offset_s - self._least_offset_s
        self._read_at = sent_at + offset_s

    def _current(self, request_id: str, epoch: int) -> Leg | None:
        """The leg that a message is for; None for an older epoch's and an ended request's."""
        leg = self._legs.get(request_id)
        return leg if leg is not None and leg.epoch == epoch else None

    def _end(self, message: str, *, lost: bool) -> None:
        if self.ended:
            return
        self.ended = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._on_end(self, lost)
        legs, self._legs = list(self._legs.values()), {}
        if lost and legs:
            log.warning("worker %s is lost under %d requests: %s", self.worker_id, len(legs), message)
        for leg in legs:
            leg.on_lost(message)
        if lost:
            for on_lost in list(self._pulled_from.values()):
                on_lost(message)

    def _rest(self) -> None:
        """No request is here: close after a while, unless another comes."""
        if not self.ended and self._idle_timer is None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(IDLE_CLOSE_S, lambda: _detached(self._close_idle()))

    async def _close_idle(self) -> None:
        if not self._legs:
            await self.close()


class WorkerPool:
    """The streams by worker. A worker's new life has a new id, and so a new stream."""

    def __init__(
        self,
        hello: worker_pb2.HelloRequest,
        decode_outputs: Callable[[bytes], Any],
        silence_s: float = SILENCE_S,
    ) -> None:
        """A worker whose stream is silent for `silence_s` is lost: several times what lies between its signs
        of life (scheduler.heartbeat_s).
        """
        self._hello = hello
        self._decode_outputs = decode_outputs
        self._silence_s = silence_s
        self._looking: asyncio.Task[None] | None = None
        self._streams: dict[str, WorkerStream] = {}
        self._opening: dict[str, asyncio.Task[WorkerStream]] = {}
        self._suspects: dict[str, float] = {}  # worker id -> until when, time.monotonic
        self._closed = False

    async def stream(self, worker: scheduler_pb2.Worker) -> WorkerStream:
        """The open stream to `worker`. Raises WorkerUnreachable within a call's deadline."""
        stream = self._streams.get(worker.worker_id)
        if stream is not None:
            return stream
        if self._closed:
            raise WorkerUnreachable("the router is ending")
        task = self._opening.get(worker.worker_id)
        if task is None:
            task = asyncio.create_task(self._open(worker), name=f"open {worker.worker_id}")
            self._opening[worker.worker_id] = task
            task.add_done_callback(lambda task: self._opened(worker.worker_id, task))
        return await asyncio.shield(task)  # others wait for it too

    def warm(self, worker: scheduler_pb2.Worker) -> None:
        """Begin to connect to a worker that is needed soon."""
        if worker.worker_id not in self._streams and not self._closed:
            _detached(self._try(worker))

    def pulled_from(
        self, worker_id: str, request_id: str, on_lost: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[None]:
        """See WorkerStream. Nothing is heard of a worker to which no stream is open."""
        stream = self._streams.get(worker_id)
        return contextlib.nullcontext() if stream is None else stream.pulled_from(request_id, on_lost)

    def abort(self, worker_id: str, request_id: str) -> None:
        """Have a worker drop a request, if it is still there."""
        if stream := self._streams.get(worker_id):
            stream.abort(request_id)

    def suspects(self) -> set[str]:
        """Workers whose stream broke a moment ago; the scheduler may not have noticed yet."""
        now = time.monotonic()
        self._suspects = {worker: until for worker, until in self._suspects.items() if until > now}
        return set(self._suspects)

    def lag_s(self) -> float:
        """By how much the slowest stream is read behind its worker, seconds: the router's own backlog."""
        now = time.monotonic()
        return max((stream.lag_s(now) for stream in self._streams.values()), default=0.0)

    async def close(self) -> None:
        """End all streams. Bounded by the connect deadline."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*(stream.close() for stream in list(self._streams.values())))

    async def _open(self, worker: scheduler_pb2.Worker) -> WorkerStream:
        stream = WorkerStream(worker, self._decode_outputs, self._ended)
        try:
            await stream.open(self._hello)
        except WorkerUnreachable:
            self._suspect(worker.worker_id)
            raise
        self._suspects.pop(worker.worker_id, None)
        self._streams[worker.worker_id] = stream
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="look after silent workers")
        return stream

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / LOOKS)
            for stream in list(self._streams.values()):
                stream.look(self._silence_s)

    def _opened(self, worker_id: str, task: asyncio.Task[WorkerStream]) -> None:
        self._opening.pop(worker_id, None)
        if not task.cancelled():
            task.exception()  # seen: whoever waited has it, and all who waited may be gone

    async def _try(self, worker: scheduler_pb2.Worker) -> None:
        with contextlib.suppress(WorkerUnreachable):  # who needs it next is told
            await self.stream(worker)

    def _ended(self, stream: WorkerStream, lost: bool) -> None:
        if self._streams.get(stream.worker_id) is stream:
            del self._streams[stream.worker_id]
        if lost:
            self._suspect(stream.worker_id)

    def _suspect(self, worker_id: str) -> None:
        self._suspects[worker_id] = time.monotonic() + SUSPECT_S


_background: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references


def _detached(coroutine: Any) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    _background.add(task)
    task.add_done_callback(_background.discard)
