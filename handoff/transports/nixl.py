"""The transport nixl reads the source's staging with NIXL, over RDMA where available.

As with shared memory, it reads headers and records where the source keeps them. It reads a header before its
record, to see that the record is complete, and again afterwards, to see that it did not change. NIXL itself
has no deadlines, digests or tickets, and does not encrypt (docs/security.md).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from google.protobuf.message import DecodeError

from baton import rpc
from baton.handoff.errors import LeaseExpired, MalformedManifest, TransportFailed
from baton.handoff.memory.views import HEADER_BYTES, SavePlan, are_inside, are_signed, digests_in, whole_ones
from baton.handoff.records import Bytes, Digests, Records
from baton.handoff.tickets import number
from baton.handoff.transports.base import Pull, SavedShard, Transport
from baton.handoff.transports.nixl_agent import Agent, Buffer, Read
from baton.protos.handoff_pb2 import NixlOffer, NixlRegion, Run, Shard

_RDMA = Path("/sys/class/infiniband")
_ADDRESSES = 1 << 57  # upper bound of a process's addresses
_LINE = 64  # bytes per cache line
_AHEAD = 512  # headers read at a time
_LOOK_S, _LOOK_GROWTH, _LOOK_MOST_S = 0.0005, 1.2, 0.01  # polling intervals of a waiting reader


class Nixl(Transport):
    name: ClassVar[str] = "nixl"

    @classmethod
    def hindrance(cls) -> str:
        if rpc.identity_folder() is not None:
            return (
                "security.tls is on, and NIXL neither encrypts KV nor authenticates readers; remove nixl from"
                " handoff.transports"
            )
        if importlib.util.find_spec("nixl") is None:
            return "the package nixl is not installed: pip install 'baton[nixl]'"
        return ""

    @classmethod
    def needless(cls) -> str:
        if not (_RDMA.is_dir() and any(_RDMA.iterdir())):
            return f"{_RDMA} has no RDMA device; without one NIXL is slower than tcp (docs/handoff-wire.md)"
        return ""

    def __init__(self) -> None:
        self._agent = Agent()

    def register(self, memory: Bytes) -> None:
        self._agent.register(memory)

    def offer(self, saved: SavedShard) -> bytes | None:
        place = saved.place
        base = int(place.memory.data.ctypes.data)
        starts = [base + place.offset + first * place.record_bytes for first, _ in place.runs]
        regions = [
            region
            for region in self._agent.regions
            if region.number == 0 or any(region.start <= start < region.stop for start in starts)
        ]
        if not regions:
            return None
        self._agent.begin((saved.request_id, saved.epoch))
        return NixlOffer(
            agent=self._agent.name,
            address=base,
            offset=place.offset,
            runs=[Run(first=first, count=count) for first, count in place.runs],
            regions=[NixlRegion(number=one.number, metadata=one.metadata) for one in regions],
        ).SerializeToString()

    def withdraw(self, request_id: str, epoch: int) -> None:
        self._agent.end((request_id, epoch))

    def reaches(self, shard: Shard) -> bool:
        return self.name in shard.offers and not self._agent.shuns(offer_of(shard).agent)

    def pull(self, pull: Pull) -> Iterator[Records]:
        offer = offer_of(pull.shard)
        runs = [(run.first, run.count) for run in offer.runs]
        if (there := sum(count for _, count in runs)) != pull.saved_blocks:
            raise MalformedManifest(f"{pull.what}: {there} slots for {pull.saved_blocks} blocks")
        if not are_inside(runs, _ADDRESSES - min(offer.address, _ADDRESSES), offer.offset, pull.record_bytes):
            raise TransportFailed(f"{pull.what}: its slots cannot lie where the offer of nixl says")
        plan = SavePlan(offer.offset, pull.record_bytes, runs)
        stop = pull.first_block + pull.num_blocks
        if stop > plan.slots:
            raise TransportFailed(f"{pull.what}: {stop} records are needed, {plan.slots} are there")
        pull.check_time()
        self._agent.know(offer.agent, {one.number: one.metadata for one in offer.regions}, pull.what)
        with self._agent.buffer(_Reader.size(pull)) as buffer:
            yield from _Reader(self._agent, pull, offer, plan, buffer).read()

    def close(self) -> None:
        self._agent.close()


def offer_of(shard: Shard) -> NixlOffer:
    """Parse a shard's offer. Raises MalformedManifest."""
    try:
        return NixlOffer.FromString(shard.offers[Nixl.name])
    except DecodeError as error:
        raise MalformedManifest(f"rank {shard.rank} at {shard.address}: its offer of nixl: {error}") from None


@dataclass(frozen=True)
class _Chunk:
    """Neighbouring records that are being read into one half of the buffer."""

    first: int
    stop: int
    half: int
    read: Read


class _Reader:
    """One pull. Its buffer has a poll's headers, and two halves, each for a chunk's headers and records."""

    def __init__(self, agent: Agent, pull: Pull, offer: NixlOffer, plan: SavePlan, buffer: Buffer) -> None:
        self._agent = agent
        self._pull = pull
        self._offer = offer
        self._plan = plan
        self._buffer = buffer
        self._ticket = number(pull.shard.ticket, pull.request_id, pull.epoch)
        self._most = _most(pull)
        self._half_bytes = _half_bytes(pull)

    @classmethod
    def size(cls, pull: Pull) -> int:
        return _AHEAD * HEADER_BYTES + 2 * _half_bytes(pull)

    def read(self) -> Iterator[Records]:
        pull, whole = self._pull, self._pull.first_block
        stop = pull.first_block + pull.num_blocks
        ahead: _Chunk | None = None
        half = 0
        for first, last in self._plan.pieces(pull.first_block, stop, self._most):
            while first < last:
                if first >= whole:
                    if ahead is not None:  # deliver available records before waiting for later ones
                        yield self._checked(ahead, self._headers_again(ahead))
                        ahead = None
                    whole = self._wait(first, stop)
                end = min(last, whole)
                again = self._headers_again(ahead) if ahead is not None else None
                piece = [self._at(*self._plan.records_of(first, end))]
                chunk = _Chunk(first, end, half, self._read(piece, self._records_at(half)))
                if ahead is not None and again is not None:
                    yield self._checked(ahead, again)
                ahead, half, first = chunk, 1 - half, end  # noqa: PLW2901
        if ahead is not None:
            yield self._checked(ahead, self._headers_again(ahead))

    def _wait(self, first: int, stop: int) -> int:
        """Wait until record `first` can be read. Return the end of the readable records."""
        stop = min(stop, first + _AHEAD)
        pieces = [self._at(*self._plan.headers_of(*one)) for one in self._plan.pieces(first, stop, _AHEAD)]
        look_s = _LOOK_S
        while True:
            self._await(self._read(pieces, 0))
            headers = self._headers(0, stop - first)
            self._check_ticket(headers)
            if count := whole_ones(headers, first, self._pull.what):
                return first + count
            self._pull.check_time()
            time.sleep(look_s)
            look_s = min(look_s * _LOOK_GROWTH, _LOOK_MOST_S)

    def _headers_again(self, chunk: _Chunk) -> Read:
        """Wait for a chunk's records, and start reading its headers again."""
        self._await(chunk.read)
        piece = self._at(*self._plan.headers_of(chunk.first, chunk.stop))
        return self._read([piece], self._headers_at(chunk.half))

    def _checked(self, chunk: _Chunk, again: Read) -> Records:
        """Return a chunk's records, if its ticket is still valid after they were read."""
        self._await(again)
        count = chunk.stop - chunk.first
        headers = self._headers(self._headers_at(chunk.half), count)
        self._check_ticket(headers)
        start = self._records_at(chunk.half)
        data = self._buffer.data[start : start + count * self._pull.record_bytes]
        return Records(chunk.first, data.reshape(count, -1), digests_in(headers))

    def _check_ticket(self, headers: Digests) -> None:
        if not are_signed(headers, self._ticket):
            raise LeaseExpired(
                f"{self._pull.what}: the source's memory no longer holds it under this ticket;"
                " it was released or its lease expired"
            )

    def _read(self, pieces: list[tuple[int, int]], offset: int) -> Read:
        return self._agent.read(self._offer.agent, pieces, self._buffer, offset, self._pull.what)

    def _await(self, read: Read) -> None:
        self._agent.wait(read, self._pull.check_time)

    def _at(self, start: int, size: int) -> tuple[int, int]:
        return self._offer.address + start, size

    def _headers_at(self, half: int) -> int:
        return _AHEAD * HEADER_BYTES + half * self._half_bytes

    def _records_at(self, half: int) -> int:
        return self._headers_at(half) + self._most * HEADER_BYTES

    def _headers(self, offset: int, count: int) -> Digests:
        found = self._buffer.data[offset : offset + count * HEADER_BYTES]
        return found.view(np.uint64).reshape(count, -1)


def _most(pull: Pull) -> int:
    return min(pull.records_a_chunk, pull.num_blocks)


def _half_bytes(pull: Pull) -> int:
    """Return the size of a chunk with its headers, in whole cache lines."""
    return -(-_most(pull) * (HEADER_BYTES + pull.record_bytes) // _LINE) * _LINE
