"""The transport shm reads records from the source's shared memory, on the same host."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from google.protobuf.message import DecodeError

from baton.handoff.errors import LeaseExpired, MalformedManifest, TransportFailed
from baton.handoff.memory import segments
from baton.handoff.memory.segments import Attached
from baton.handoff.memory.views import SaveView, are_inside, joined
from baton.handoff.records import Records
from baton.handoff.tickets import number
from baton.handoff.transports.base import Pull, SavedShard, Transport
from baton.protos.handoff_pb2 import Run, Shard, SharedMemoryOffer
from baton.rpc import host_id

if TYPE_CHECKING:  # it imports torch
    from baton.handoff.memory.streams import Device


class Shm(Transport):
    name: ClassVar[str] = "shm"
    windows: ClassVar[bool] = True

    def __init__(self) -> None:
        self._host = host_id()
        self._attached: OrderedDict[str, Attached] = OrderedDict()
        self._device: Device | None = None
        self._lock = threading.Lock()

    def reads_for(self, device: Device) -> None:
        self._device = device

    def offer(self, saved: SavedShard) -> bytes:
        return SharedMemoryOffer(
            host=self._host,
            segment=saved.place.segment,
            offset=saved.place.offset,
            runs=[Run(first=first, count=count) for first, count in joined(saved.place.runs)],
        ).SerializeToString()

    def reaches(self, shard: Shard) -> bool:
        return self.name in shard.offers and offer_of(shard).host == self._host

    def pull(self, pull: Pull) -> Iterator[Records]:
        offer = offer_of(pull.shard)
        runs = [(run.first, run.count) for run in offer.runs]
        if (there := sum(count for _, count in runs)) != pull.slots:
            raise MalformedManifest(f"{pull.what}: {there} slots are offered; the shard has {pull.slots}")
        attached = self._attach(pull, offer.segment)
        segment = attached.data
        if not are_inside(runs, segment.size, offer.offset, pull.record_bytes):
            raise TransportFailed(
                f"{pull.what}: its slots, from {offer.offset} on, do not lie in segment {offer.segment}"
            )
        view = SaveView(segment, offer.offset, pull.record_bytes, runs)
        ticket = number(pull.shard.ticket, pull.request_id, pull.epoch)
        stop = pull.first_block + pull.num_blocks
        if stop > pull.saved_blocks:
            raise TransportFailed(f"{pull.what}: {stop} records are needed, {pull.saved_blocks} are there")
        self._check(pull, view.holds(ticket, pull.first_block, stop))

        def check() -> None:
            pull.check_time()
            self._check(pull, view.holds(ticket, first, first + 1))

        for first, last in view.pieces(pull.first_block, stop, pull.records_a_chunk):
            if self._device is not None:
                attached.pin(self._device, sum(view.records_of(first, last)))
            while first < last:
                pull.check_time()
                end = view.wait(first, last, pull.what, check)
                yield Records(first, view.records(first, end), view.digests(first, end))
                self._check(pull, view.lends(ticket, first, end))
                first = end  # noqa: PLW2901

    def close(self) -> None:
        with self._lock:
            self._attached.clear()

    @staticmethod
    def _check(pull: Pull, there: bool) -> None:
        if not there:
            raise LeaseExpired(
                f"{pull.what}: shared memory no longer holds it under this ticket;"
                " it was released or its lease expired"
            )

    def _attach(self, pull: Pull, name: str) -> Attached:
        gone = []  # freed outside the lock, because unpinning takes time
        with self._lock:
            if name not in self._attached:
                # an opportunity to drop segments whose owners have died
                for known in [known for known in self._attached if not segments.exists(known)]:
                    gone.append(self._attached.pop(known))
                try:
                    self._attached[name] = segments.attach(name)
                except (OSError, ValueError) as error:
                    raise TransportFailed(f"{pull.what}: segment {name} cannot be mapped: {error}") from None
            return self._attached[name]


def offer_of(shard: Shard) -> SharedMemoryOffer:
    """Parse a shard's offer. Raises MalformedManifest."""
    try:
        return SharedMemoryOffer.FromString(shard.offers[Shm.name])
    except DecodeError as error:
        raise MalformedManifest(f"rank {shard.rank} at {shard.address}: its offer of shm: {error}") from None
