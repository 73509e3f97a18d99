"""The client of the Handoff service, and the cache of channels to other workers."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from baton.handoff.errors import TransportFailed
from baton.handoff.reports import Staged
from baton.protos import handoff_pb2 as pb
from baton.protos.handoff_pb2_grpc import HandoffStub
from baton.rpc import CALL_TIMEOUT_S, Dialler
from baton.security.names import Role

if TYPE_CHECKING:  # plain text needs no cryptography
    from baton.security.identity import Credentials

logger = logging.getLogger(__name__)

MAX_CHANNELS = 64  # per HandoffClient
C = TypeVar("C")
S = TypeVar("S")


@dataclass(eq=False)
class Kept(Generic[C, S]):
    """A channel and its stub. The stub is kept because making one takes as long as a call."""

    address: str
    credentials: object  # used to make the channel
    channel: C
    stub: S
    calls: int = 0


class ChannelCache(Generic[C, S]):
    """Cache channels to workers by address, because connecting costs more than a call. Thread-safe.

    A channel in use is not closed, so there may be more channels than the limit. When this process's
    certificate is replaced, new calls get new channels, and calls on the old ones may finish.
    """

    def __init__(
        self,
        open_: Callable[[Dialler, str], C],
        stub: Callable[[C], S],
        close: Callable[[C], object],
        bound: int,
    ) -> None:
        self._dialler = Dialler(Role.WORKER)
        self._open, self._stub, self._close, self._bound = open_, stub, close, bound
        self._kept: OrderedDict[str, Kept[C, S]] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def credentials(self) -> Credentials | None:
        """The credentials for new channels; a new object after each replacement."""
        return self._dialler.credentials

    def begin(self, address: str) -> Kept[C, S]:
        """Return the channel to host:port for a call, after which `end` must be called."""
        with self._lock:
            credentials = self.credentials
            kept = self._kept.pop(address, None)
            if kept is not None and kept.credentials is not credentials:
                self._close_if_unused(kept)
                kept = None
            if kept is None:
                channel = self._open(self._dialler, address)
                kept = Kept(address, credentials, channel, self._stub(channel))
            kept.calls += 1
            self._kept[address] = kept
            idle = [one for one in self._kept.values() if not one.calls]
            for one in idle[: max(0, len(self._kept) - self._bound)]:
                del self._kept[one.address]
                self._close(one.channel)
            return kept

    def end(self, kept: Kept[C, S]) -> None:
        with self._lock:
            kept.calls -= 1
            if self._kept.get(kept.address) is not kept:
                self._close_if_unused(kept)

    def close(self) -> None:
        """Close all channels, which ends their calls. Idempotent."""
        with self._lock:
            kept, self._kept = self._kept, OrderedDict()
        for one in kept.values():
            self._close(one.channel)

    def _close_if_unused(self, kept: Kept[C, S]) -> None:
        if not kept.calls:
            self._close(kept.channel)


class HandoffClient:
    """Call Handoff services. Failed releases and renewals are only logged, because leases expire."""

    def __init__(self, bound: int = MAX_CHANNELS) -> None:
        self.channels = ChannelCache(Dialler.channel, HandoffStub, lambda one: one.close(), bound)

    def call(self, method: str, address: str, request: Any, timeout_s: float) -> grpc.Future[Any]:
        kept = self.channels.begin(address)
        try:
            call: grpc.Future[Any] = getattr(kept.stub, method).future(request, timeout=timeout_s)
        except BaseException:
            self.channels.end(kept)
            raise
        call.add_done_callback(lambda _: self.channels.end(kept))
        return call

    def release_soon(
        self,
        manifest: pb.Manifest,
        *,
        confirmed: bool = False,
        shards: Iterable[pb.Shard] | None = None,
        reader: tuple[int, int] = (0, 1),
    ) -> list[grpc.Future[pb.ReleaseReply]]:
        """Release shards (default: all), without waiting. reader: this rank, and how many ranks pull."""
        calls = []
        for shard in manifest.shards if shards is None else shards:
            if shard.address:
                request = pb.ReleaseRequest(
                    request_id=manifest.request_id,
                    epoch=manifest.epoch,
                    confirmed=confirmed,
                    ticket=shard.ticket,
                    reader=reader[0],
                    readers=reader[1],
                )
                calls.append(self.call("Release", shard.address, request, CALL_TIMEOUT_S))
                calls[-1].add_done_callback(_note)
        return calls

    def renew(
        self, manifests: Iterable[pb.Manifest], timeout_s: float = CALL_TIMEOUT_S
    ) -> set[tuple[str, int]]:
        """Renew the leases of these saves, in one call per rank.

        Returns the (request id, epoch) of each save that a rank still holds. A rank that does not reply is
        assumed to hold all its shards.
        """
        asked: dict[str, list[pb.Held]] = {}
        for manifest in manifests:
            for shard in manifest.shards:
                held = pb.Held(request_id=manifest.request_id, epoch=manifest.epoch, ticket=shard.ticket)
                asked.setdefault(shard.address, []).append(held)
        calls = [
            (keys, self.call("Renew", address, pb.RenewRequest(handoffs=keys), timeout_s))
            for address, keys in asked.items()
        ]
        found: set[tuple[str, int]] = set()
        for keys, call in calls:
            try:
                gone = {(one.request_id, one.epoch) for one in call.result().gone}
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                logger.warning("leases were not renewed: %s", error)
                gone = set()
            found |= {(one.request_id, one.epoch) for one in keys} - gone
        return found

    def staged(self, addresses: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> Staged:
        """Return how much KV is waiting to be pulled on these ranks. Raises TransportFailed."""
        calls = [self.call("Staged", address, pb.StagedRequest(), timeout_s) for address in addresses]
        try:
            replies = [call.result() for call in calls]
        except grpc.RpcError as error:
            raise TransportFailed(
                f"no reply from the Handoff services at {', '.join(addresses)}: {error.code().name}: "
                f"{error.details()}"
            ) from None
        return Staged(
            handoffs=max((reply.handoffs for reply in replies), default=0),
            bytes=sum(reply.bytes for reply in replies),
            capacity=sum(reply.capacity for reply in replies),
            overdue_s=max((reply.overdue_s for reply in replies), default=0.0),
        )

    def try_handoff(
        self, ranks: Sequence[str], sources: Sequence[str], transport: str, size: int, timeout_s: float
    ) -> pb.TrialReply:
        """Make each of these ranks pull a test payload from a rank of another worker, concurrently.

        If the numbers of ranks differ, some ranks take part in several rounds. Returns the total bytes and
        the seconds that the slowest rank of each round took, summed over the rounds; or a problem.
        """
        count, total = max(len(ranks), len(sources)), pb.TrialReply()
        pairs = list(itertools.islice(zip(itertools.cycle(ranks), itertools.cycle(sources)), count))
        ends = time.monotonic() + timeout_s
        for at in range(0, count, len(ranks)):
            calls = [
                self.call(
                    "Trial",
                    rank,
                    pb.TrialRequest(source=source, transport=transport, bytes=size),
                    max(0.0, ends - time.monotonic()),
                )
                for rank, source in pairs[at : at + len(ranks)]
            ]
            try:
                replies = [call.result() for call in calls]
            except grpc.RpcError as error:
                return pb.TrialReply(
                    problem=f"a rank does not answer: {error.code().name}: {error.details()}"
                )
            total.bytes += sum(reply.bytes for reply in replies)
            total.seconds += max(reply.seconds for reply in replies)
            total.problem = total.problem or next((one.problem for one in replies if one.problem), "")
        return total

    def close(self) -> None:
        self.channels.close()


def _note(call: grpc.Future[pb.ReleaseReply]) -> None:
    try:
        call.result()
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        logger.info("a release did not arrive; the lease will expire: %s", error)
