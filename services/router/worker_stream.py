"""Manage the gRPC stream to one worker, which carries all requests from this router to that worker.

The stream is lost if it breaks or falls silent: idle workers send empty messages. One reader task hands each
output to its request's listener by a direct call: no task is woken per token. One writer task sends, because
concurrent writes end a grpc.aio stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio

from baton.attempts import attempt_id
from baton.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc import CALL_TIMEOUT_S, aio_channel
from baton.security.names import Role
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.images import Image
from baton.services.router.outbox import Outbox
from baton.tasks import spawn_apart

log = logging.getLogger(__name__)

CLOCK_DRIFT = 1e-4  # seconds per second; an upper bound for two hosts' clocks
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from its stubs
IDLE_CLOSE_S = 60.0  # a stream without requests is closed after this long
CHECKS = 5  # checks within the time of silence after which a stream is lost
GANG_CHECKS = 3  # silent checks that suffice once another worker of its gang has ended
GAP_EVERY_S = 0.25  # between two samples of the time between two tokens, per stream
GAP_WAIT_S = 5.0  # wait for a sampled request's next output: it may have ended or been preempted
LAG_COUNTS_S = 0.25  # a measured lag is valid for this long; a stream that is behind gets a message sooner


_NOTES = ("saved", "admitted", "shared", "failed")  # fields of RunReply, for the listener's on_saved etc.


class StreamListener:
    """The receiver of one request's messages from one worker. The calls must not block."""

    request_id: str
    epoch: int

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """Take one engine step's output. The offset converts the worker's monotonic clock to ours."""

    def on_gap(self, engine_s: float, wire_s: float, received: float) -> None:
        """Take a sample of the time between two tokens; the output of the second one follows.

        engine_s: the time in the engine; wire_s: the second token's delay on the wire, compared with the
        quickest message; received: when the second token arrived here
        """

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """Handle the report that the prompt's KV was saved for another worker, or could not be saved."""

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """Handle the report that the KV was loaded; the request may still be waiting for a slot."""

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """Handle the number of KV blocks shared with other requests, sent when decoding begins."""

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        """Handle the worker's failure to complete the request."""

    def on_lost(self, message: str) -> None:
        """Handle the end of the stream."""


class GapSampler:
    """Samples the time between two tokens: when `due`, watches one request until its next output."""

    def __init__(self) -> None:
        self.due = 0.0  # time.monotonic; outputs before this need not be shown
        self.engine_s = 0.0  # the last sample
        self._watched = ""  # an attempt_id
        self._since = 0.0  # when the watched request's last output came, on the worker's clock
        self._until = 0.0

    def look(self, outputs: Any, now: float) -> str:
        """Look at one engine step's outputs. Return the attempt id of a completed sample, or ""."""
        if not self._watched:
            first = outputs.outputs[0] if outputs.outputs else None
            if first is not None and first.finish_reason is None:
                self._watched = first.request_id
                self._since = outputs.timestamp
                self._until = now + GAP_WAIT_S
            return ""
        found = next((one for one in outputs.outputs if one.request_id == self._watched), None)
        if found is None and now < self._until:
            return ""
        watched, self._watched = self._watched, ""
        self.due = now + GAP_EVERY_S
        if found is None or not found.new_token_ids:
            return ""
        self.engine_s = outputs.timestamp - self._since
        return watched


class WorkerStream:
    """One worker's Run stream. When it ends, each remaining listener gets one `on_lost`."""

    def __init__(
        self,
        worker: scheduler_pb2.Worker,
        decode_outputs: Callable[[bytes], Any],
        on_end: Callable[[WorkerStream, bool], None],
        on_image: Callable[[Image], None],
    ) -> None:
        self.worker = worker
        self.worker_id = worker.worker_id
        self.address = worker.address
        self._decode_outputs = decode_outputs
        self._on_end = on_end
        self._listeners: dict[str, StreamListener] = {}  # keyed by attempt id
        self._pulls: dict[
            str, Callable[[str], None]
        ] = {}  # keyed by request id; called if its saved KV is lost
        self._outbox = Outbox(on_image)
        self.sent = self._outbox.sent  # the images that the worker was sent
        self._channel: grpc.aio.Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._idle_timer: asyncio.TimerHandle | None = None
        # Difference of the worker's clock and ours, by the quickest message. Includes its travel time.
        self.clock_offset_s = math.inf
        self.emitted_at = 0.0  # when the engine emitted the last outputs, on our clock
        self._gap = GapSampler()
        self._last_sent_at = 0.0  # the worker's clock
        self._heard = True  # a message has come since the last check
        self._silent_checks, self._most_silent = 0, CHECKS
        self.ended = False
        self.speculative_method = ""  # empty without speculation
        self.gang = ""  # the life of the worker's gang; empty without a gang
        self._lag_s = 0.0  # delay of the last message, compared with the quickest one
        self._read_at = 0.0  # our clock

    async def open(self, hello: worker_pb2.HelloRequest) -> None:
        """Connect, and compare versions and models. Raises WorkerUnreachable."""
        channel = aio_channel(self.address, Role.WORKER)
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
        if problem := self._refusal(reply, hello.protocol):
            await channel.close(None)
            log.error("worker %s at %s cannot be used: %s", self.worker_id, self.address, problem)
            raise WorkerUnreachable(f"worker {self.worker_id}: {problem}")
        self._channel = channel
        self.speculative_method = reply.identity.capacity.speculative_method
        self.gang = reply.identity.gang.life
        call = stub.Run()
        self._tasks = [
            spawn_apart(self._write(call), f"write {self.worker_id}"),
            spawn_apart(self._read(call), f"read {self.worker_id}"),
        ]
        self._close_when_idle()

    def _refusal(self, reply: worker_pb2.HelloReply, protocol: int) -> str:
        if reply.refusal:
            return reply.refusal
        if reply.protocol != protocol:
            return (
                f"it speaks protocol {reply.protocol}, this router {protocol}: run the same version of Baton"
            )
        there = reply.identity.worker_id
        if there and there != self.worker_id:
            return f"{self.address} is now worker {there}"
        return ""

    def begin(self, listener: StreamListener, start: worker_pb2.Start, images: Sequence[Image] = ()) -> bool:
        """Send the images that the worker lacks, then `start`; the replies go to `listener`.

        Return False if the stream has ended or is congested.
        """
        if self.ended or not self._outbox.start(start, images):
            return False
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._listeners[attempt_id(listener.request_id, listener.epoch)] = listener
        return True

    def forget(self, listener: StreamListener) -> None:
        """Ignore all later messages for this listener. Idempotent."""
        key = attempt_id(listener.request_id, listener.epoch)
        if self._listeners.get(key) is listener:
            del self._listeners[key]
            self._outbox.drop(key)
            self._close_when_idle()

    @contextlib.contextmanager
    def watch_pull(self, request_id: str, on_lost: Callable[[str], None]) -> Iterator[None]:
        """Call `on_lost` if this worker is lost inside the block, while its KV is being pulled."""
        if self.ended:
            on_lost("its stream has ended")
        self._pulls[request_id] = on_lost
        try:
            yield
        finally:
            self._pulls.pop(request_id, None)
            self._close_when_idle()

    def abort(self, request_id: str) -> None:
        if not self.ended:
            self._outbox.abort(request_id)

    def lag_s(self, now: float) -> float:
        """Return how many seconds late this stream is being read; 0 if its last message is too old."""
        return self._lag_s if now < self._read_at + LAG_COUNTS_S else 0.0

    def check_silence(self, silence_s: float) -> None:
        """End the stream if it has been silent for `silence_s`; called CHECKS times within that time.

        It counts checks, not seconds: if this process was suspended, unread messages are not the worker's
        fault.
        """
        self._silent_checks = 0 if self._heard else self._silent_checks + 1
        self._heard = False
        self._check_silence(f"no message for {silence_s * self._most_silent / CHECKS:g} s")

    def gang_ended(self) -> None:
        """Accept less silence: another worker of this worker's gang has ended, so this one may be hanging.

        If it does not hang, it reports the end of each request itself.
        """
        self._most_silent = GANG_CHECKS
        self._check_silence("it is silent, and its gang is over")

    def _check_silence(self, why: str) -> None:
        if self._silent_checks >= self._most_silent and not self._heard:
            self._lose(why)

    def _lose(self, why: str) -> None:
        if not self.ended:
            self._end(why, lost=True)
            _detached(self.close())

    async def close(self) -> None:
        """End the stream; its remaining listeners get `on_lost`."""
        self._end("the router closes the connection", lost=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    async def _write(self, call: Any) -> None:
        try:
            await self._outbox.send(call.write)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader reports the error

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
            message = f"it sent an unreadable message: {error}"
        finally:
            call.cancel()
            if not self.ended:
                self._end(message, lost=True)
                _detached(self.close())  # in another task, because closing waits for this one

    def _dispatch(self, reply: worker_pb2.RunReply) -> None:
        listeners = self._listeners
        if reply.engine_outputs:
            outputs = self._decode_outputs(reply.engine_outputs)
            now = time.monotonic()
            self._note_lag(outputs.timestamp, now - outputs.timestamp)
            offset_s = self.clock_offset_s
            self.emitted_at = outputs.timestamp + offset_s
            if now >= self._gap.due:
                self._sample_gap(outputs, now)
            for output in outputs.outputs:
                listener = listeners.get(output.request_id)
                if listener is not None:
                    listener.on_output(output, offset_s)
        for kind in _NOTES:
            for note in getattr(reply, kind):
                listener = listeners.get(attempt_id(note.request_id, note.epoch))
                if listener is not None:
                    getattr(listener, f"on_{kind}")(note)

    def _note_lag(self, sent_at: float, offset_s: float) -> None:
        """Compare a message with the quickest one so far, adjusted for the drift of the hosts' clocks."""
        faded = self.clock_offset_s + CLOCK_DRIFT * max(0.0, sent_at - self._last_sent_at)
        self._last_sent_at = sent_at
        self.clock_offset_s = min(faded, offset_s)
        self._lag_s = offset_s - self.clock_offset_s
        self._read_at = sent_at + offset_s

    def _sample_gap(self, outputs: Any, now: float) -> None:
        watched = self._gap.look(outputs, now)
        if watched and (listener := self._listeners.get(watched)) is not None:
            listener.on_gap(self._gap.engine_s, self._lag_s, now)

    def _end(self, message: str, *, lost: bool) -> None:
        if self.ended:
            return
        self.ended = True
        self._outbox.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._on_end(self, lost)
        listeners, self._listeners = list(self._listeners.values()), {}
        if lost and listeners:
            log.warning("worker %s is lost, with %d requests: %s", self.worker_id, len(listeners), message)
        for listener in listeners:
            listener.on_lost(message)
        if lost:
            for on_lost in list(self._pulls.values()):
                on_lost(message)

    def _close_when_idle(self) -> None:
        """If the stream is idle, close it after IDLE_CLOSE_S unless another request comes."""
        if self._idle and not self.ended and self._idle_timer is None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(IDLE_CLOSE_S, lambda: _detached(self._close_idle()))

    @property
    def _idle(self) -> bool:
        """Whether it has no requests and no KV to be pulled. The worker frees such KV with the stream."""
        return not self._listeners and not self._pulls

    async def _close_idle(self) -> None:
        self._idle_timer = None
        if self._idle:
            await self.close()


_background: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references


def _detached(coroutine: Any) -> None:
    task = spawn_apart(coroutine, "close a stream")
    _background.add(task)
    task.add_done_callback(_background.discard)
