"""Shared memory: on one host the records are read where the source keeps them, without asking it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar

from baton.handoff import digests
from baton.handoff.errors import LeaseExpired, TransportFailed
from baton.handoff.manifest import places
from baton.handoff.memory import segments
from baton.handoff.memory.segments import Bytes
from baton.handoff.memory.views import View, are_inside
from baton.handoff.transports.base import Pull, Records, Transport
from baton.protos.handoff_pb2 import Shard
from baton.rpc import host_id


class SharedMemory(Transport):
    """Reads a segment of the source. The tickets of the records tell whether they held still."""

    name: ClassVar[str] = "shm"

    def __init__(self) -> None:
        self._host = host_id()
        self._attached: OrderedDict[str, Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def reaches(self, shard: Shard) -> bool:
        return bool(shard.segment) and shard.host == self._host

    def pull(self, pull: Pull) -> Iterator[Records]:
        shard = pull.shard
        segment = self._attach(pull)
        ticket = digests.seed(pull.request_id, pull.epoch)
        stop = pull.first_block + pull.num_blocks
        runs = places(shard)
        if not are_inside(runs, segment, shard.offset, pull.record_bytes):
            raise TransportFailed(
                f"{pull.what}: its slots, from {shard.offset} on, do not lie in segment {shard.segment}"
            )
        view = View(segment, shard.offset, pull.record_bytes, runs)
        if stop > view.num_blocks:
            raise TransportFailed(f"{pull.what}: {stop} records are needed, {view.num_blocks} are there")
        self._check_ticket(pull, view, ticket, pull.first_block, stop)  # before anything is loaded
        for first, last in view.pieces(pull.first_block, stop, pull.records_a_chunk):

            def check(first: int = first, last: int = last) -> None:
                pull.check_time()
                self._check_ticket(pull, view, ticket, first, last)

            pull.check_time()
            view.wait(first, last, pull.what, check)
            yield Records(first, view.records(first, last), view.digests(first, last))
            self._check_ticket(pull, view, ticket, first, last)

    def close(self) -> None:
        with self._lock:
            self._attached.clear()

    @staticmethod
    def _check_ticket(pull: Pull, view: View, ticket: int, first: int, last: int) -> None:
        if not view.holds(ticket, first, last):
            raise LeaseExpired(
                f"{pull.what}: its place in shared memory holds it no more;"
                " it was released or its lease ran out"
            )

    def _attach(self, pull: Pull) -> Bytes:
        name = pull.shard.segment
        with self._lock:
            if name not in self._attached:
                # A new name means a new segment or a new source: let go of those whose owners are gone.
                for known in [known for known in self._attached if not segments.exists(known)]:
                    del self._attached[known]
                try:
                    self._attached[name] = segments.attach(name)
                except (OSError, ValueError) as error:
                    raise TransportFailed(f"{pull.what}: segment {name} cannot be mapped: {error}") from None
            return self._attached[name]
