"""Misbehaving ends of a pull over TCP."""

import contextlib
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import numpy as np
import psutil

from baton import addresses, rpc
from baton.handoff.frames import GREETING, PULL, RECORDS, Frame, Line
from baton.handoff.memory.arena import Arena
from baton.handoff.records import Bytes, Digests
from baton.handoff.save.door import Door
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Cancellation, Pull
from baton.protos import handoff_pb2 as pb
from baton.protos.handoff_pb2_grpc import HandoffServicer, HandoffStub, add_HandoffServicer_to_server
from baton.rpc import CHANNEL_OPTIONS
from harness.support import PATIENCE

KEY = ("r", 1)
MIB = 1 << 20


class Rank:
    """A rank in this process that saves random records."""

    def __init__(self, record_bytes=4096, slots=64, port=0):
        self.staging = Staging(Arena((slots + 4) * (record_bytes + 4096), record_bytes), 30.0)
        self.service = HandoffService(self.staging, 0, f"127.0.0.1:{port}", 4 * MIB)
        self.record_bytes = record_bytes
        self.data = np.empty((0, record_bytes), np.uint8)

    @property
    def door(self):
        return self.service._door

    def save(self, count, there=None):
        """Save `count` records; the first `there` are available at once, the others after `come`."""
        self.data = np.random.default_rng(1).integers(0, 256, (count, self.record_bytes), np.uint8)
        self.entry = self.staging.reserve(*KEY, count)
        there = count if there is None else there
        self.staging.publish(self.entry, growing=there < count)
        self.come(0, there)

    def come(self, first, stop):
        if first < stop:
            fill = self.staging.filling(self.entry, first, stop)
            for one, end in self.entry.view.pieces(first, stop, stop - first):
                self.entry.view.records(one, end)[:] = self.data[one:end]
                fill.add(np.arange(one, end, dtype=np.uint64))
            fill.close()

    def pull(self, **changes):
        shard = pb.Shard(
            address=self.service.address,
            record_bytes=self.record_bytes,
            ticket=self.staging.tickets.of(*KEY),
            offers={"tcp": b""},
        )
        count = len(self.data)
        given = {
            **{"request_id": KEY[0], "epoch": KEY[1], "shard": shard, "saved_blocks": count},
            **{"first_block": 0, "num_blocks": count, "chunk_bytes": MIB},
            "cancellation": Cancellation(time.monotonic() + 30 * PATIENCE),
        }
        return Pull(**{**given, **changes})

    def wanted(self, **changes):
        """Return a request for all records, as the frame that asks for them."""
        given = {"request_id": KEY[0], "epoch": KEY[1], "num_blocks": len(self.data), "at_once": 1}
        given["ticket"] = self.staging.tickets.of(*KEY)
        return Frame(PULL, pb.PullRequest(**{**given, **changes}).SerializeToString())

    def asks(self, line, greeting=b""):
        line.send(self.wanted(), before=greeting)

    def is_quiet(self):
        return not self.door._running

    def close(self):
        self.service.close(0)
        self.staging.close()


def connections(port):
    """Return how many of this process's connections lead to a port."""
    found = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr[1] == port and one.status == "ESTABLISHED" for one in found)


@dataclass(frozen=True)
class Chunk:
    """A frame of records."""

    first_block: int
    records: Bytes
    digests: Digests
    count: int = -1  # the frame's number of records; by default that of the digests

    def encode(self):
        """Return the frame in plain text."""
        head = self.digests.tobytes()
        count = len(self.digests) if self.count < 0 else self.count
        prefix = struct.pack("<4sIII", RECORDS, len(head), self.first_block, count)
        return prefix + head + self.records.tobytes()


class FalseSource(HandoffServicer):
    """A Handoff service that answers each pull with `messages` and hangs up."""

    def __init__(self):
        self.messages = []
        self._server = rpc.server(ThreadPoolExecutor(2), 16)
        add_HandoffServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{rpc.listen(self._server, 'test', '127.0.0.1:0')}"
        self._door = Door("127.0.0.1", 0, self._answer, sealed=False)
        self._server.start()

    def Connect(self, request, context):
        del request, context
        return self._door.invite()

    def Release(self, request, context):
        del request, context
        return pb.ReleaseReply()

    def close(self):
        self._server.stop(0).wait(5)
        self._door.close(0)

    def _answer(self, line):
        line.receive()
        with contextlib.suppress(OSError):
            line._socket.sendall(b"".join(self.messages))
        return False


def connect(address):
    """Return a connection to a rank, in plain text, and the greeting to send first."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        reply = HandoffStub(channel).Connect(pb.ConnectRequest(), timeout=20)
    return Line(knock(address, reply.port)), GREETING + reply.session


def knock(address, port):
    return socket.create_connection((addresses.split(address)[0], port), timeout=20)
