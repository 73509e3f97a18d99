"""A rank's Handoff service.

Its calls use gRPC. Records go over TCP connections (door.py); a puller gets a session for one with a gRPC
call, so certificates and the table of roles apply to both.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError

from baton import addresses, rpc
from baton.handoff import ports
from baton.handoff.config import MAX_PULL_S
from baton.handoff.errors import (
    ERROR_KEY,
    HandoffError,
    MalformedManifest,
    PullCancelled,
    SourceBusy,
    WrongTicket,
)
from baton.handoff.frames import FAIL, MOST_RECORDS, PULL, RECORDS, WAIT, WAIT_S, Broken, Frame, Line
from baton.handoff.reports import Key
from baton.handoff.save.door import Door
from baton.handoff.save.staging import Staging
from baton.handoff.save.trial import Trials
from baton.protos import handoff_pb2 as pb
from baton.protos.handoff_pb2_grpc import HandoffServicer, add_HandoffServicer_to_server

logger = logging.getLogger(__name__)

GROWING = 16  # maximum early pulls; each holds a thread until the prompt is complete
_REQUEST_S = 5.0  # time to receive a request
_THREADS = 8
_MAX_CALLS = 128  # running and queued; further calls are refused
_CODES: dict[type[HandoffError], grpc.StatusCode] = {
    MalformedManifest: grpc.StatusCode.FAILED_PRECONDITION,
    WrongTicket: grpc.StatusCode.PERMISSION_DENIED,
}

Context = grpc.ServicerContext


class HandoffService(HandoffServicer):
    def __init__(
        self,
        staging: Staging,
        rank: int,
        listen: str,
        chunk_bytes: int,
        advertise: str = "",
        *,
        trials: Trials | None = None,
    ) -> None:
        """Listen on host:port and the next port (0: free). Raises HandoffError. trials: None: refuse them."""
        self._staging = staging
        self._trials = trials
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="baton-handoff")
        self._server = rpc.server(pool, _MAX_CALLS)
        add_HandoffServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        host, wanted = addresses.split(listen)
        rpc.check_exposure("handoff.listen", host)
        answer, records_port = Answers(staging, rank, chunk_bytes).answer, ports.for_records(wanted)
        try:
            self._door = Door(host, records_port, answer, sealed=rpc.certificate() is not None)
        except (OSError, OverflowError):
            raise _cannot_listen(addresses.join(host, records_port)) from None
        port = rpc.listen(self._server, "handoff.listen", listen)
        if not port:
            self._door.close(0)
            raise _cannot_listen(listen)
        self.door_port = self._door.port
        self.address = addresses.join(advertise or host, port)  # how other machines reach it
        self.local_address = addresses.from_here(addresses.join(host, port))
        self._server.start()

    def close(self, grace_s: float = 1.0) -> None:
        """Stop; running pulls have `grace_s` to end. Idempotent."""
        stopped = self._server.stop(grace_s)
        self._door.close(grace_s)
        stopped.wait(grace_s + 1)

    def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectReply:
        del request, context
        return self._door.invite()

    def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        try:
            self._staging.tickets.check(request.request_id, request.epoch, request.ticket)
        except WrongTicket as error:
            _fail(context, error)
        reader = (request.reader, request.readers) if request.confirmed else (0, 1)
        held = self._staging.release(request.request_id, request.epoch, reader)
        logger.debug(
            "release of %s/%d, confirmed %s: held %s",
            request.request_id,
            request.epoch,
            request.confirmed,
            held,
            extra={"request_id": request.request_id},
        )
        return pb.ReleaseReply(held=held)

    def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:
        del context
        theirs: list[Key] = []
        gone: list[Key] = []
        for held in request.handoffs:
            key = held.request_id, held.epoch
            (theirs if self._staging.tickets.fits(*key, held.ticket) else gone).append(key)
        gone += self._staging.renew(theirs)
        return pb.RenewReply(gone=[pb.Held(request_id=name, epoch=epoch) for name, epoch in gone])

    def Taken(self, request: pb.TakenRequest, context: Context) -> pb.TakenReply:
        try:
            self._staging.tickets.check(request.request_id, request.epoch, request.ticket)
            reader = request.reader, max(1, request.readers)
            self._staging.take(request.request_id, request.epoch, request.taken, request.wanted, reader)
        except HandoffError as error:
            _fail(context, error)
        return pb.TakenReply()

    def Staged(self, request: pb.StagedRequest, context: Context) -> pb.StagedReply:
        del request, context
        handoffs, size = self._staging.held()
        return pb.StagedReply(
            handoffs=handoffs,
            bytes=size,
            capacity=self._staging.capacity_bytes,
            overdue_s=self._staging.overdue_s(),
        )

    def Sample(self, request: pb.SampleRequest, context: Context) -> pb.SampleReply:
        try:
            return self._tried(context).sample(request.bytes)
        except HandoffError as error:
            _fail(context, error)

    def Trial(self, request: pb.TrialRequest, context: Context) -> pb.TrialReply:
        return self._tried(context).trial(request)

    def _tried(self, context: Context) -> Trials:
        if self._trials is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service makes no trials")
            raise AssertionError("abort raises")
        return self._trials


class Answers:
    """Answer pulls of one rank's saves. Thread-safe."""

    def __init__(self, staging: Staging, rank: int, chunk_bytes: int) -> None:
        self._staging = staging
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._growing = threading.BoundedSemaphore(GROWING)

    def answer(self, line: Line) -> bool:
        """Answer the next request. Returns whether the connection can be used again; raises Broken."""
        late_s = time.monotonic() + _REQUEST_S

        def in_time() -> None:
            if time.monotonic() > late_s:
                raise Broken(f"no complete request within {_REQUEST_S:g} s")

        frame = line.receive(in_time, _REQUEST_S)
        try:
            if frame.kind != PULL:
                raise MalformedManifest(f"expected a pull, received {frame.kind!r}")
            try:
                request = pb.PullRequest.FromString(frame.head)
            except DecodeError as error:
                raise MalformedManifest(f"the pull cannot be parsed: {error}") from None
            self._send(line, request)
        except PullCancelled:
            return False  # the other end has disconnected
        except HandoffError as error:
            line.send(Frame(FAIL, f"{type(error).__name__}\n{error}".encode()))
        return True

    def _send(self, line: Line, request: pb.PullRequest) -> None:
        if request.rank != self._rank:
            raise MalformedManifest(f"this is rank {self._rank}; the pull is for rank {request.rank}")
        key = request.request_id, request.epoch
        self._staging.tickets.check(*key, request.ticket)
        look = _Watch(line)
        most = min(self._chunk_bytes, min(request.at_once, MOST_RECORDS) * self._staging.record_bytes)
        blocks = request.first_block, request.num_blocks
        chunks = self._staging.read(*key, blocks, most, look.waiting)
        with self._room(request), contextlib.closing(chunks):
            for records in chunks:
                head = records.digests.astype("<u8", copy=False).tobytes()
                frame = Frame(RECORDS, head, records.first_block, len(records.data))
                line.send(frame, records.data, look.sending)
                look.sent()

    @contextlib.contextmanager
    def _room(self, request: pb.PullRequest) -> Iterator[None]:
        if not self._staging.is_growing(request.request_id, request.epoch):
            yield
            return
        if not self._growing.acquire(blocking=False):
            raise SourceBusy(
                f"KV of request {request.request_id!r}: its prompt is not complete yet, and {GROWING} pulls"
                " of incomplete prompts are running already"
            )
        try:
            yield
        finally:
            self._growing.release()


class _Watch:
    """End a pull that takes too long or whose puller has disconnected; send keepalives to waiting pullers."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._ends_s = time.monotonic() + MAX_PULL_S
        self._sent_s = time.monotonic()

    def sent(self) -> None:
        self._sent_s = time.monotonic()

    def sending(self) -> None:
        """Raise Broken after MAX_PULL_S: pullers give up before that."""
        if time.monotonic() > self._ends_s:
            raise Broken(f"a pull took longer than {MAX_PULL_S:g} s")

    def waiting(self) -> None:
        self.sending()
        if self._line.peek() is not False:
            raise PullCancelled("the pull was given up")
        if time.monotonic() - self._sent_s > WAIT_S:
            self._line.send(Frame(WAIT))
            self.sent()


def _fail(context: Context, error: HandoffError) -> NoReturn:
    """Abort the call with the error's text and name, from which the caller can raise the same error."""
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.NOT_FOUND)
    context.abort(code, str(error))


def _cannot_listen(listen: str) -> HandoffError:
    return HandoffError(
        f"cannot serve KV on {listen}: the port is taken or the host is not this machine's; set "
        "handoff.listen to an address of this machine, with a free port before another free one, or with 0"
    )
