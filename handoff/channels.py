"""The client of the Handoff service, with one channel per address."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

_MAX_CHANNELS = 64  # above this, channels that no call can still use are closed
_LONGEST_CALL_S = 120.0  # trials take the longest


@dataclass
class _Kept:
    """A channel and its stub. The stub is kept because making one takes as long as a call."""

    used: float  # last use, time.monotonic
    channel: grpc.Channel
    stub: HandoffStub


class Channels:
    """Cache channels by address, because connecting costs more than a call. Thread-safe.

    A channel is closed only when no call can still be running on it, so there may briefly be more channels
    than the bound. When this process's certificate is replaced, new calls get new channels, and calls on the
    old ones may finish.
    """

    def __init__(self, bound: int = _MAX_CHANNELS) -> None:
        self._bound = bound
        self._dialler = Dialler(Role.WORKER)
        self._credentials = self._dialler.credentials
        self._channels: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self._retired: deque[tuple[float, grpc.Channel]] = deque()  # time.monotonic, oldest first
        self._lock = threading.Lock()

    @property
    def credentials(self) -> Credentials | None:
        """The credentials of new channels; a new object after each replacement."""
        return self._dialler.credentials

    def stub(self, address: str) -> HandoffStub:
        """Return the stub of the Handoff service at host:port, opening a channel if needed."""
        with self._lock:
            self._retire()
            now = time.monotonic()
            kept = self._channels.pop(address, None)
            if kept is None:
                channel = self._dialler.channel(address)
                kept = _Kept(now, channel, HandoffStub(channel))  # type: ignore[no-untyped-call]
            kept.used = now
            self._channels[address] = kept
            while len(self._channels) > self._bound:
                oldest = next(iter(self._channels.values()))
                if oldest.used >= now - _LONGEST_CALL_S:
                    break
                self._channels.popitem(last=False)
                oldest.channel.close()
            return kept.stub

    def close(self) -> None:
        """Close all channels. Idempotent."""
        with self._lock:
            for channel in [
                *(kept.channel for kept in self._channels.values()),
                *(channel for _, channel in self._retired),
            ]:
                channel.close()
            self._channels.clear()
            self._retired.clear()

    def _retire(self) -> None:
        """Retire the channels of a replaced certificate; close retired ones without running calls."""
        now = time.monotonic()
        if (credentials := self._dialler.credentials) is not self._credentials:
            self._credentials = credentials
            self._retired += [(now, kept.channel) for kept in self._channels.values()]
            self._channels.clear()
        while self._retired and self._retired[0][0] < now - _LONGEST_CALL_S:
            self._retired.popleft()[1].close()


class HandoffClient:
    """Call Handoff services. If one is gone, releases and renewals fail silently: its leases expire."""

    def __init__(self, channels: Channels | None = None) -> None:
        self.channels = channels or Channels()

    def release(
        self, manifest: pb.Manifest, *, confirmed: bool = False, timeout_s: float = CALL_TIMEOUT_S
    ) -> bool:
        """Release a save on all its ranks, and wait for the replies.

        Returns False if a rank no longer held it or could not be reached.
        """
        calls = self._start_release(manifest, manifest.shards, confirmed, timeout_s)
        # a list, so that every call is waited for
        return False not in [_held(call) for call in calls]

    def release_soon(
        self,
        manifest: pb.Manifest,
        *,
        confirmed: bool = False,
        shards: Iterable[pb.Shard] | None = None,
        reader: tuple[int, int] = (0, 1),
    ) -> None:
        """Release all shards, or the given ones, without waiting.

        reader: the releasing rank and the number of ranks that pull; the last rank's release counts.
        """
        chosen = manifest.shards if shards is None else shards
        for call in self._start_release(manifest, chosen, confirmed, CALL_TIMEOUT_S, reader):
            call.add_done_callback(_note)

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
            (
                keys,
                self.channels.stub(address).Renew.future(pb.RenewRequest(handoffs=keys), timeout=timeout_s),
            )
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

    def acknowledge(self, request: pb.TakenRequest, address: str) -> grpc.Future[pb.TakenReply]:
        """Acknowledge records to a rank; the caller checks the reply."""
        call: grpc.Future[pb.TakenReply] = self.channels.stub(address).Taken.future(
            request, timeout=CALL_TIMEOUT_S
        )
        return call

    def staged(self, addresses: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> Staged:
        """Return how much KV waits on these ranks. Raises TransportFailed."""
        calls = [
            self.channels.stub(address).Staged.future(pb.StagedRequest(), timeout=timeout_s)
            for address in addresses
        ]
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

    def sample(self, address: str, size: int, timeout_s: float) -> pb.SampleReply:
        """Make a rank stage a test payload of `size` bytes. Raises grpc.RpcError."""
        reply: pb.SampleReply = self.channels.stub(address).Sample(
            pb.SampleRequest(bytes=size), timeout=timeout_s
        )
        return reply

    def release_sample(self, address: str, sample: pb.SampleReply) -> None:
        """Release a test payload, without waiting."""
        request = pb.ReleaseRequest(request_id=sample.request_id, epoch=1, ticket=sample.shard.ticket)
        self.channels.stub(address).Release.future(request, timeout=CALL_TIMEOUT_S).add_done_callback(_note)

    def try_handoff(
        self, ranks: Sequence[str], sources: Sequence[str], transport: str, size: int, timeout_s: float
    ) -> pb.TrialReply:
        """Make each of these ranks pull a test payload from a rank of another worker, concurrently.

        If the numbers of ranks differ, some ranks take part in several rounds. Returns the total bytes and
        the sum over rounds of the slowest rank's seconds, or a problem.
        """
        count, total = max(len(ranks), len(sources)), pb.TrialReply()
        pairs = list(itertools.islice(zip(itertools.cycle(ranks), itertools.cycle(sources)), count))
        ends = time.monotonic() + timeout_s
        for at in range(0, count, len(ranks)):
            calls = [
                self.channels.stub(rank).Trial.future(
                    pb.TrialRequest(source=source, transport=transport, bytes=size),
                    timeout=max(0.0, ends - time.monotonic()),
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

    def _start_release(
        self,
        manifest: pb.Manifest,
        shards: Iterable[pb.Shard],
        confirmed: bool,
        timeout_s: float,
        reader: tuple[int, int] = (0, 1),
    ) -> list[grpc.Future[pb.ReleaseReply]]:
        def request(shard: pb.Shard) -> pb.ReleaseRequest:
            return pb.ReleaseRequest(
                request_id=manifest.request_id,
                epoch=manifest.epoch,
                confirmed=confirmed,
                ticket=shard.ticket,
                reader=reader[0],
                readers=reader[1],
            )

        return [
            self.channels.stub(shard.address).Release.future(request(shard), timeout=timeout_s)
            for shard in shards
            if shard.address
        ]


def _note(call: grpc.Future[pb.ReleaseReply]) -> None:
    _held(call)


def _held(call: grpc.Future[pb.ReleaseReply]) -> bool:
    try:
        return bool(call.result().held)
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        logger.info("a release did not arrive; the lease will expire: %s", error)
        return False
