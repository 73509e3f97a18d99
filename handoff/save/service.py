"""A rank's Handoff service: it serves what staging holds, and takes releases, renewals and what was taken."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from baton import addresses, rpc
from baton.handoff import wire
from baton.handoff.config import MAX_PULL_S
from baton.handoff.errors import (
    HandoffError,
    MalformedManifest,
    PullCancelled,
    PullTimeout,
    SourceBusy,
    WrongTicket,
)
from baton.handoff.save.entry import Key
from baton.handoff.save.staging import Staging
from baton.handoff.save.trial import Trials
from baton.handoff.wire import ERROR_KEY, PULL, RELEASE, RENEW, SAMPLE, SERVICE, STAGED, TAKEN, TRIAL
from baton.protos import handoff_pb2 as pb
from baton.rpc import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_THREADS = 24
GROWING = 16  # pulls that wait for prompts that are still computed: each holds a thread for a while
_MAX_CALLS = 128  # running and queued; further calls are refused at once
_CODES: dict[type[HandoffError], grpc.StatusCode] = {
    MalformedManifest: grpc.StatusCode.FAILED_PRECONDITION,
    WrongTicket: grpc.StatusCode.PERMISSION_DENIED,
}


class HandoffService:
    """The gRPC server of one rank, with threads of its own."""

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
        """Listen on `listen` (host:port; port 0 takes a free one) at once.

        advertise: the host under which others find the service; that of `listen` if empty. trials: of this
        rank; without, none are made here. Raises HandoffError when the service cannot listen.
        """
        self._staging = staging
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._trials = trials
        self._growing = threading.BoundedSemaphore(GROWING)
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="baton-handoff")
        self._server = rpc.server(pool, _MAX_CALLS)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        port = rpc.listen(self._server, "handoff.host", listen)
        if not port:
            raise HandoffError(
                f"cannot serve KV on {listen}: the port is taken or the host is not this one; set "
                "handoff.host to an address of this machine and handoff.port to a free port, or to 0"
            )
        host, _ = addresses.split(listen)
        self.address = addresses.join(advertise or host, port)  # as others dial it
        self.local_address = addresses.from_here(addresses.join(host, port))
        self._server.start()

    def close(self, grace_s: float = 1.0) -> None:
        """Stop; pulls under way have `grace_s` to end. Idempotent."""
        self._server.stop(grace_s).wait(grace_s + 1)

    def _handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                PULL: grpc.unary_stream_rpc_method_handler(
                    self._pull,
                    request_deserializer=pb.PullRequest.FromString,
                    response_serializer=wire.encode,
                ),
                RELEASE: grpc.unary_unary_rpc_method_handler(
                    self._release,
                    request_deserializer=pb.ReleaseRequest.FromString,
                    response_serializer=pb.ReleaseReply.SerializeToString,
                ),
                RENEW: grpc.unary_unary_rpc_method_handler(
                    self._renew,
                    request_deserializer=pb.RenewRequest.FromString,
                    response_serializer=pb.RenewReply.SerializeToString,
                ),
                TAKEN: grpc.unary_unary_rpc_method_handler(
                    self._taken,
                    request_deserializer=pb.TakenRequest.FromString,
                    response_serializer=pb.TakenReply.SerializeToString,
                ),
                STAGED: grpc.unary_unary_rpc_method_handler(
                    self._staged,
                    request_deserializer=pb.StagedRequest.FromString,
                    response_serializer=pb.StagedReply.SerializeToString,
                ),
                SAMPLE: grpc.unary_unary_rpc_method_handler(
                    self._sample,
                    request_deserializer=pb.SampleRequest.FromString,
                    response_serializer=pb.SampleReply.SerializeToString,
                ),
                TRIAL: grpc.unary_unary_rpc_method_handler(
                    self._trial,
                    request_deserializer=pb.TrialRequest.FromString,
                    response_serializer=pb.TrialReply.SerializeToString,
                ),
            },
        )

    def _pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> Iterator[wire.RawChunk]:
        try:
            left_s = context.time_remaining()
            if left_s > MAX_PULL_S:
                raise PullTimeout(f"a pull needs a deadline within {MAX_PULL_S:g} s; it has {left_s:g} s")
            if request.rank != self._rank:
                raise MalformedManifest(f"this service is rank {self._rank}'s; rank {request.rank} is wanted")
            blocks = request.first_block, request.num_blocks
            self._staging.tickets.check(request.request_id, request.epoch, request.ticket)
            wanted = request.message_bytes or MAX_MESSAGE_BYTES
            with self._room(request):
                for records in self._staging.read(
                    request.request_id,
                    request.epoch,
                    blocks,
                    min(self._chunk_bytes, wanted),
                    lambda: _check(context),
                ):
                    yield from wire.split(records, wanted)
        except HandoffError as error:
            _fail(context, error)

    @contextlib.contextmanager
    def _room(self, request: pb.PullRequest) -> Iterator[None]:
        """Count a pull that will wait for a prompt's steps. Raises SourceBusy."""
        if not self._staging.is_growing(request.request_id, request.epoch):
            yield
            return
        if not self._growing.acquire(blocking=False):
            raise SourceBusy(
                f"KV of request {request.request_id!r}: its prompt is still computed, and {GROWING} pulls"
                " wait for such ones already"
            )
        try:
            yield
        finally:
            self._growing.release()

    def _release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
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

    def _renew(self, request: pb.RenewRequest, context: grpc.ServicerContext) -> pb.RenewReply:
        del context
        theirs: list[Key] = []
        gone: list[Key] = []
        for held in request.handoffs:
            key = held.request_id, held.epoch
            (theirs if self._staging.tickets.fits(*key, held.ticket) else gone).append(key)
        gone += self._staging.renew(theirs)
        return pb.RenewReply(gone=[pb.Held(request_id=name, epoch=epoch) for name, epoch in gone])

    def _taken(self, request: pb.TakenRequest, context: grpc.ServicerContext) -> pb.TakenReply:
        try:
            self._staging.tickets.check(request.request_id, request.epoch, request.ticket)
            reader = request.reader, max(1, request.readers)
            self._staging.take(request.request_id, request.epoch, request.taken, request.wanted, reader)
        except HandoffError as error:
            _fail(context, error)
        return pb.TakenReply()

    def _staged(self, request: pb.StagedRequest, context: grpc.ServicerContext) -> pb.StagedReply:
        del request, context
        handoffs, size = self._staging.held()
        return pb.StagedReply(
            handoffs=handoffs,
            bytes=size,
            capacity=self._staging.capacity_bytes,
            overdue_s=self._staging.overdue_s(),
        )

    def _sample(self, request: pb.SampleRequest, context: grpc.ServicerContext) -> pb.SampleReply:
        try:
            return self._tried(context).sample(request.bytes)
        except HandoffError as error:
            _fail(context, error)

    def _trial(self, request: pb.TrialRequest, context: grpc.ServicerContext) -> pb.TrialReply:
        return self._tried(context).trial(request)

    def _tried(self, context: grpc.ServicerContext) -> Trials:
        if self._trials is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no trials are made here")
            raise AssertionError("abort raises")
        return self._trials


def _check(context: grpc.ServicerContext) -> None:
    """Raise PullCancelled when nobody waits any more."""
    if not context.is_active():
        raise PullCancelled("the pull was given up")


def _fail(context: grpc.ServicerContext, error: HandoffError) -> NoReturn:
    """End the call with the error; its name goes beside the text, so that the caller can raise the same."""
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.NOT_FOUND)
    context.abort(code, str(error))
