"""Misbehaving ends of a pull over TCP."""

import contextlib
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import grpc
import numpy as np
import psutil

from baton import addresses, rpc
from baton.handoff.errors import ERROR_KEY
from baton.handoff.frames import FAIL, GREETING, PULL, RECORDS, WAIT, Broken, Frame, Line
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
from tests.handoff import caches

BLOCKS = 6
SERVICE = "baton.handoff.v1.Handoff"


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

    def asks(self, line, greeting=b""):
        wanted = pb.PullRequest(
            request_id=KEY[0],
            epoch=KEY[1],
            num_blocks=len(self.data),
            ticket=self.staging.tickets.of(*KEY),
            at_once=1,
        )
        line.send(Frame(PULL, wanted.SerializeToString()), before=greeting)

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


def ended(line, record_bytes):
    """Read frames until all records, or an error, whose name is returned."""
    came = 0
    try:
        while came < BLOCKS:
            frame = line.receive()
            if frame.kind == FAIL:
                return frame.head.split(b"\n")[0].decode()
            if frame.kind == RECORDS:
                came += frame.records
                line.receive_records(frame, np.empty(frame.records * record_bytes, np.uint8))
    except Broken:
        return "hung up"
    return ""


def garble_service(number, seed):
    """Send nonsense to a real service; yields its kind and the error's name, empty if it was served.

    Raises AssertionError if the save there was affected.
    """
    rng = random.Random(seed)
    source = caches.source(caches.make_cache(9, 1))
    source.save("victim", BLOCKS * caches.BLOCK_SIZE, range(1, 7), epoch=3)
    with grpc.insecure_channel(source.service.address, options=CHANNEL_OPTIONS) as channel:
        caller = _Caller(source, channel)
        try:
            for _ in range(number):
                yield rng.choice(_NONSENSE)(rng, caller)
            assert source.staging.held()[0] == 1, "nonsense released what was saved"
            assert caller.pull(caller.right()) == "", "a right pull is refused"
        finally:
            source.close()


class _Caller:
    """Calls a service that has a save."""

    def __init__(self, source, channel):
        self.source = source
        self.ticket = source.staging.tickets.of("victim", 3)
        self._channel = channel

    def right(self):
        return pb.PullRequest(
            request_id="victim", epoch=3, num_blocks=BLOCKS, ticket=self.ticket, at_once=BLOCKS
        )

    def pull(self, request):
        return self.say(Frame(PULL, request.SerializeToString()))

    def say(self, *frames):
        line, greeting = connect(self.source.service.address)
        with closing(line):
            for number, frame in enumerate(frames):
                line.send(frame, before=b"" if number else greeting)
            return ended(line, self.source.cache.record_bytes)

    def shout(self, words):
        """Send bytes to the port for records."""
        address = self.source.service.address
        with closing(Line(knock(address, self.source.service.door_port))) as line:
            line._socket.sendall(words)
            line._socket.shutdown(socket.SHUT_WR)
            return ended(line, self.source.cache.record_bytes)

    def call(self, method, message):
        try:
            answer = self._channel.unary_unary(f"/{SERVICE}/{method}")(message, timeout=5)
        except grpc.RpcError as error:
            call = error
            names = [value for key, value in call.trailing_metadata() or () if key == ERROR_KEY]
            return str(names[0]) if names else f"gRPC's {call.code().name}"
        return "not held" if method == "Release" and not pb.ReleaseReply.FromString(answer).held else ""


def _garbage(rng, caller):
    message = b"\x0a\xff" + rng.randbytes(rng.choice((0, 5, 4096)))  # a string longer than the message
    kind = rng.choice((PULL, b"Release", b"Taken"))
    outcome = caller.say(Frame(PULL, message)) if kind == PULL else caller.call(kind.decode(), message)
    return "service: garbage", outcome


def _shout(rng, caller):
    session = rng.randbytes(16)
    words = (b"", b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(rng.choice((1, 23, 24, 4096))), GREETING)
    return "door: nonsense", caller.shout(rng.choice((*words, GREETING + session[:5], GREETING + session)))


def _no_pull(rng, caller):
    wanted = caller.right().SerializeToString()
    kind = rng.choice((RECORDS, WAIT, FAIL, b"XXXX", bytes(4)))
    frame = rng.choice((Frame(kind, wanted), Frame(PULL, bytes(70_000)), Frame(kind)))
    return "door: no pull", caller.say(frame)


def _wrong_pull(rng, caller):
    request, ticket = caller.right(), caller.ticket
    huge = rng.choice((2**31, 2**32 - 1))
    key, value = rng.choice(
        (
            ("request_id", rng.choice(("", "other", "victim\x00", "v" * 100_000))),
            ("epoch", rng.choice((0, 2, 4, 2**64 - 1))),
            ("rank", rng.choice((1, huge))),
            ("first_block", rng.choice((1, 6, 7, huge))),
            ("num_blocks", rng.choice((0, 7, huge))),
            ("ticket", rng.choice((b"", ticket[:-1], ticket + b"\0", rng.randbytes(16)))),
        )
    )
    setattr(request, key, value)
    return "service: wrong pull", caller.pull(request)


_NONSENSE = [_garbage, _shout, _no_pull, _wrong_pull]
