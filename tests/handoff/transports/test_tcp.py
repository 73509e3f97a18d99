"""The connections of the transport tcp, and what can happen to them: real sockets, real processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from baton import rpc
from baton.handoff import frames
from baton.handoff.errors import PullCancelled, PullTimeout, TransportFailed, UnknownHandoff
from baton.handoff.frames import FAIL, PULL, RECORDS, SHUT, Frame, Line
from baton.handoff.memory import segments
from baton.handoff.memory.arena import Arena
from baton.handoff.records import Bytes
from baton.handoff.save import door, pulls
from baton.handoff.save.entry import Entry
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Pull
from baton.handoff.transports.lines import Lines
from baton.handoff.transports.tcp import Tcp
from baton.protos.handoff_pb2 import PullRequest, Shard
from baton.security import identity
from baton.security.authority import Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role
from harness.support import PATIENCE, eventually, free_ports
from tests.handoff.remote import RemoteSource
from tests.handoff.server import Chunk, FalseSource, connect, knock
from tests.handoff.transports.test_transports import drain, pull_of

KEY = ("r", 1)
MIB = 1 << 20


class Source:
    """A rank that saved random records, in this process."""

    def __init__(self, record_bytes: int = 4096, slots: int = 64, port: int = 0) -> None:
        self.staging = Staging(Arena((slots + 4) * (record_bytes + 4096), record_bytes), 30.0)
        self.service = HandoffService(self.staging, 0, f"127.0.0.1:{port}", 4 * MIB)
        self.record_bytes = record_bytes
        self.data: Bytes = np.empty((0, record_bytes), np.uint8)
        self.entry: Entry

    @property
    def door(self) -> door.Door:
        return self.service._door

    def save(self, count: int, there: int | None = None) -> None:
        """Save `count` records, of which `there` come at once and the others by `come`."""
        self.data = np.random.default_rng(1).integers(0, 256, (count, self.record_bytes), np.uint8)
        self.entry = self.staging.reserve(*KEY, count)
        there = count if there is None else there
        self.staging.publish(self.entry, growing=there < count)
        self.come(0, there)

    def come(self, first: int, stop: int) -> None:
        if first < stop:
            fill = self.staging.filling(self.entry, first, stop)
            for one, end in self.entry.view.pieces(first, stop, stop - first):
                self.entry.view.records(one, end)[:] = self.data[one:end]
                fill.add(np.arange(one, end, dtype=np.uint64))
            fill.close()

    def pull(self, **changes: object) -> Pull:
        shard = Shard(
            address=self.service.address,
            record_bytes=self.record_bytes,
            ticket=self.staging.tickets.of(*KEY),
            offers={"tcp": b""},
        )
        count = len(self.data)
        given: dict[str, object] = {
            **{"request_id": KEY[0], "epoch": KEY[1], "shard": shard, "saved_blocks": count},
            **{"first_block": 0, "num_blocks": count, "deadline": time.monotonic() + 30 * PATIENCE},
            "chunk_bytes": MIB,
        }
        return Pull(**{**given, **changes})  # type: ignore[arg-type]

    def asks(self, line: Line, greeting: bytes = b"") -> None:
        wanted = PullRequest(
            request_id=KEY[0],
            epoch=KEY[1],
            num_blocks=len(self.data),
            ticket=self.staging.tickets.of(*KEY),
            at_once=1,
        )
        line.send(Frame(PULL, wanted.SerializeToString()), before=greeting)

    def is_quiet(self) -> bool:
        """Whether no pull runs."""
        return not self.door._running

    def close(self) -> None:
        self.service.close(0)
        self.staging.close()


@pytest.fixture
def source() -> Iterator[Source]:
    with closing(Source()) as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[Tcp]:
    with closing(Tcp()) as made:
        yield made


def connections(port: int) -> int:
    """Return how many of this process's connections lead to a port."""
    found = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr[1] == port and one.status == "ESTABLISHED" for one in found)


def ends_soon(act: Callable[[], object], within_s: float = 2.0) -> None:
    began = time.monotonic()
    act()
    assert time.monotonic() - began < within_s * PATIENCE


# ---- what comes


@pytest.mark.parametrize(
    ("record_bytes", "count"), [(64, 9000), (16 << 10, 300), (384 << 10, 9), (5 * MIB // 2, 4)]
)
def test_records_of_any_size_come_whole(tcp: Tcp, record_bytes: int, count: int) -> None:
    """Many in a frame, and one that is larger than frames are."""
    with closing(Source(record_bytes, count)) as source:
        source.save(count)
        got, digests = [], []
        for records in tcp.pull(source.pull()):
            assert len(records.data) == 1 or records.data.size <= frames.FRAME_BYTES
            got.append(records.data.copy())
            digests.append(records.digests.copy())
        assert np.array_equal(np.concatenate(got), source.data)
        assert np.array_equal(np.concatenate(digests), source.entry.view.digests(0, count))


def test_records_come_as_they_are_saved_and_a_rank_without_any_is_heard(
    source: Source, tcp: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a prompt may take longer than a silent source is waited for."""
    monkeypatch.setattr(frames, "SILENT_S", 1.0)
    monkeypatch.setattr(pulls, "WAIT_S", 0.2)
    source.save(9, there=2)
    chunks = tcp.pull(source.pull())
    assert len(next(chunks).data) == 2
    later = threading.Timer(2.5, source.come, (2, 9))
    later.start()
    assert np.array_equal(np.concatenate([one.data.copy() for one in chunks]), source.data[2:])
    later.join()


def test_memory_released_under_a_stream_stays(source: Source, tcp: Tcp) -> None:
    source.save(64)
    chunks = tcp.pull(source.pull(num_blocks=64))
    got = [next(chunks).data.copy()]
    source.staging.release(*KEY)
    got += [records.data.copy() for records in chunks]
    assert np.array_equal(np.concatenate(got), source.data)


# ---- how it ends


def test_a_deadline_that_is_moved_while_a_pull_waits_counts(source: Source, tcp: Tcp) -> None:
    source.save(4, there=1)
    pull = source.pull()
    chunks = tcp.pull(pull)
    next(chunks)
    threading.Timer(0.2, object.__setattr__, (pull, "deadline", 0.0)).start()
    with pytest.raises(PullTimeout):
        ends_soon(lambda: next(chunks))
    eventually(source.is_quiet, 2, "the source's thread is free")


def test_a_cancelled_pull_ends_at_once_at_both_ends(source: Source, tcp: Tcp) -> None:
    source.save(4, there=1)
    pull = source.pull()
    chunks = tcp.pull(pull)
    next(chunks)
    threading.Timer(0.2, pull.cancellation.set).start()
    with pytest.raises(PullCancelled):
        ends_soon(lambda: next(chunks))
    eventually(source.is_quiet, 2, "the source's thread is free")


def test_a_pull_that_ended_cancels_no_other(source: Source, tcp: Tcp) -> None:
    """The connection is another pull's by then."""
    source.save(4)
    ended = source.pull()
    assert np.array_equal(drain(tcp, ended), source.data)
    source.staging.release(*KEY)
    source.save(4, there=1)
    chunks = tcp.pull(source.pull())
    got = [next(chunks).data.copy()]
    ended.cancellation.set()
    source.come(1, 4)
    got += [one.data.copy() for one in chunks]
    assert np.array_equal(np.concatenate(got), source.data)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_source_that_ends_or_stops_ends_its_pulls(
    own_folder: Path, tcp: Tcp, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Its host still acknowledges what a stopped process does not read."""
    monkeypatch.setattr(frames, "SILENT_S", 1.0)
    doomed = RemoteSource()
    pid = doomed.process.pid or 0
    chunks = tcp.pull(pull_of(doomed.begin("steps", range(1, 3), whole=9)))
    next(chunks)
    os.kill(pid, signal.SIGKILL if killed else signal.SIGSTOP)
    try:
        with pytest.raises(TransportFailed, match="it hung up|reset" if killed else "nothing came for 1 s"):
            ends_soon(lambda: next(chunks), 4)
    finally:
        os.kill(pid, signal.SIGKILL)
        doomed.process.join(timeout=10)
    segments.remove_stale()


def test_a_puller_that_reads_nothing_holds_no_thread(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SLOW_S", 0.5)
    with closing(Source(MIB, 40)) as large:
        large.save(40)
        line, greeting = connect(large.service.address)
        with closing(line):
            large.asks(line, greeting)
            eventually(lambda: not large.is_quiet(), 2, "it runs")
            eventually(large.is_quiet, 5, "the source has given it up")


def test_a_pull_may_take_only_so_long(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MAX_PULL_S", 0.3)
    source.save(4, there=1)
    line, greeting = connect(source.service.address)
    with closing(line):
        source.asks(line, greeting)
        line.receive_records(line.receive(), np.empty(4096, np.uint8))
        assert line.receive().head.startswith(b"PullTimeout\n")


# ---- connections


def test_a_connection_serves_pull_after_pull(source: Source, tcp: Tcp) -> None:
    source.save(4)
    for _ in range(5):
        assert np.array_equal(drain(tcp, source.pull()), source.data)
    source.staging.release(*KEY)
    with pytest.raises(UnknownHandoff):  # and those that the source refuses
        drain(tcp, source.pull())
    source.save(4)
    assert np.array_equal(drain(tcp, source.pull()), source.data)
    assert connections(source.service.door_port) == 1


def test_pulls_at_once_have_a_connection_each_and_few_are_kept(source: Source, tcp: Tcp) -> None:
    source.save(4, there=1)
    running = [tcp.pull(source.pull()) for _ in range(9)]
    for one in running:
        next(one)
    assert connections(source.service.door_port) == 9
    source.come(1, 4)
    source.staging.grown(source.entry)
    for one in running:
        assert sum(len(records.data) for records in one) == 3
    eventually(lambda: connections(source.service.door_port) == 6, 2, "the others are closed")


def test_a_connection_that_the_source_closed_meanwhile_is_made_anew(
    source: Source, tcp: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(4)
    monkeypatch.setattr(door, "IDLE_S", 0.3)
    assert np.array_equal(drain(tcp, source.pull()), source.data)
    eventually(lambda: not source.door._idle and source.is_quiet(), 2, "the source has hung up")
    monkeypatch.setattr(Lines, "kept", Lines._take)  # as if that was not known yet
    assert np.array_equal(drain(tcp, source.pull()), source.data)


def test_a_source_that_began_anew_at_its_address_is_found(tcp: Tcp) -> None:
    port = free_ports()
    with closing(Source(port=port)) as before:
        before.save(4)
        assert np.array_equal(drain(tcp, before.pull()), before.data)
    with closing(Source(port=port)) as after:
        after.save(4)
        assert np.array_equal(drain(tcp, after.pull()), after.data)


def test_a_port_that_is_closed_is_said_to_be(
    source: Source, tcp: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(4)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(source.door, "port", port)
    with pytest.raises(TransportFailed, match=rf"port {port}.*refused; is it open .*handoff\.port"):
        drain(tcp, source.pull())


# ---- strangers


def said(connection: socket.socket) -> str:
    """Return the words with which a rank hung up."""
    connection.settimeout(10 * PATIENCE)
    whole = b""
    while piece := connection.recv(4096):
        whole += piece
    assert whole.startswith(SHUT), whole
    return whole[16:].decode()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n",
            "KV is pulled here, by workers that asked the Handoff service",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "KV is pulled here"),
        (frames.GREETING + bytes(16), "that session is over, or was never one of this rank's"),
    ],
)
def test_whoever_has_no_session_is_told_so(source: Source, words: bytes, text: str) -> None:
    with knock(source.service.address, source.service.door_port) as stranger:
        stranger.sendall(words)
        assert text in said(stranger)


def test_a_session_is_for_one_connection_and_for_a_while(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(1)
    line, greeting = connect(source.service.address)
    with closing(line):
        source.asks(line, greeting)
        assert line.receive().kind == RECORDS
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(door, "_SESSION_S", -1.0)
            greeting = frames.GREETING + source.door.invite().session
        with knock(source.service.address, source.service.door_port) as again:
            again.sendall(greeting)
            assert "that session is over" in said(again)


def test_strangers_that_say_nothing_or_too_slowly_are_hung_up_on(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "GREETING_S", 0.5)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(knock(source.service.address, source.service.door_port))
            for _ in range(door.STRANGERS)
        ]
        slow = silent[0]
        slow.send(frames.GREETING[:3])
        eventually(lambda: len(source.door._strangers) == door.STRANGERS, 2, "all wait")
        one_more = stack.enter_context(knock(source.service.address, source.service.door_port))
        assert said(slow) == f"{door.STRANGERS} others came that say nothing either"
        assert {said(one) for one in [*silent[1:], one_more]} == {"no greeting within 0.5 s"}
    source.save(2)
    with closing(Tcp()) as tcp:
        assert np.array_equal(drain(tcp, source.pull()), source.data)


def test_a_request_that_comes_too_slowly_is_hung_up_on(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "_REQUEST_S", 0.5)
    line, greeting = connect(source.service.address)
    with closing(line):
        line._socket.sendall(greeting + b"PULL")
        eventually(lambda: not source.is_quiet(), 2, "it is waited for")
        eventually(source.is_quiet, 3, "it is not waited for any more")
        with pytest.raises(frames.Broken, match="hung up"):
            line.receive()


def test_the_idlest_connection_makes_room_and_one_too_many_is_refused(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "CONNECTIONS", 4)
    source.save(4, there=1)
    with ExitStack() as stack:
        lines = []
        for _ in range(4):
            line, greeting = connect(source.service.address)
            stack.enter_context(closing(line))
            line._socket.sendall(greeting)
            lines.append(line)
        eventually(lambda: len(source.door._idle) == 4, 2, "all are idle")
        fifth, greeting = connect(source.service.address)
        stack.enter_context(closing(fifth))
        source.asks(fifth, greeting)
        assert fifth.receive().kind == RECORDS
        assert [line.peek() for line in lines] == [None, False, False, False]
        for line in lines[1:]:
            source.asks(line)
            assert line.receive().kind == RECORDS
        sixth, _ = connect(source.service.address)
        stack.enter_context(closing(sixth))
        assert said(sixth._socket) == "4 connections are in use: try again"


def test_only_so_many_pulls_run(source: Source, tcp: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "CALLS", 2)
    source.save(4, there=1)
    running = [tcp.pull(source.pull()) for _ in range(2)]
    for one in running:
        next(one)
    with pytest.raises(TransportFailed, match="2 pulls run here already: try again"):
        drain(tcp, source.pull())
    for one in running:
        one.close()  # type: ignore[attr-defined]


def test_threads_that_rest_end(source: Source, tcp: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    def working() -> int:
        return sum(thread.name == "baton-kv-pull" for thread in threading.enumerate())

    before = working()
    monkeypatch.setattr(door, "REST_S", 0.2)
    source.save(4)
    for _ in range(3):
        drain(tcp, source.pull())
    assert working() == before + 1
    eventually(lambda: working() == before, 3, "the thread has ended")
    assert np.array_equal(drain(tcp, source.pull()), source.data)


def test_a_false_frame_is_an_error(source: Source, tcp: Tcp) -> None:
    """Other cases are those of tests/handoff/mutations.py."""
    source.save(2)
    record, own = np.zeros(4096, np.uint8), np.zeros(1, np.uint64)
    cases = {
        "it hung up": [Chunk(0, record[:-1], own)],
        "1 records from block 1 on": [Chunk(1, record, own)],
        "3 records from block 0 on": [Chunk(0, record, np.zeros(3, np.uint64))],
        "b'RECS' and a head of 8 bytes": [Chunk(0, record, own, count=2)],
        "b'RECS' and a head of 80000 bytes": [Chunk(0, record, np.zeros(10_000, np.uint64))],
    }
    with closing(FalseSource()) as liar:
        pull = source.pull()
        pull.shard.address = liar.address
        for text, chunks in cases.items():
            liar.messages = [chunk.encode() for chunk in chunks]
            with pytest.raises(TransportFailed, match=text):
                drain(tcp, pull)


# ---- with TLS


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Source]:
    """A source with a certificate; the process is another worker from then on."""
    authority = Authority.create(tmp_path / "ca")
    for role, worker_id in ((Role.WORKER, "source"), (Role.WORKER, "puller"), (Role.ROUTER, "")):
        identity.write(tmp_path / (worker_id or role), authority.issue(Name("test", role, worker_id)))
    rpc.act_as(Identity(tmp_path / "source"))
    with closing(Source(300_000, 8)) as made:
        made.save(8)
        rpc.act_as(Identity(tmp_path / "puller"))
        yield made
    rpc.act_as(None)


def test_a_sealed_connection_serves_pull_after_pull(sealed: Source) -> None:
    with closing(Tcp()) as tls:
        for _ in range(3):
            assert np.array_equal(drain(tls, sealed.pull()), sealed.data)
        assert connections(sealed.service.door_port) == 1


class Between:
    """Whoever is between the two ends: it reads all, and may change a byte."""

    def __init__(self, port: int, change_at: int = -1) -> None:
        self._port, self._change_at = port, change_at
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.seen = bytearray()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        here, _ = self._server.accept()
        with here, socket.create_connection(("127.0.0.1", self._port)) as there:
            asking = threading.Thread(target=self._pass_on, args=(here, there))
            asking.start()
            self._pass_on(there, here, spied_on=True)
            asking.join()

    def _pass_on(self, source: socket.socket, to: socket.socket, *, spied_on: bool = False) -> None:
        with suppress(OSError):
            while piece := bytearray(source.recv(65536)):
                if spied_on:
                    at = self._change_at - len(self.seen)
                    self.seen += piece
                    if 0 <= at < len(piece):
                        piece[at] ^= 1
                to.sendall(piece)
        for one in (source, to):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        self._thread.join(10)


def test_who_is_between_reads_nothing(sealed: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Between(sealed.door.port)) as between, closing(Tcp()) as tls:
        monkeypatch.setattr(sealed.door, "port", between.port)
        assert np.array_equal(drain(tls, sealed.pull()), sealed.data)
        tls.close()
    seen = bytes(between.seen)
    assert len(seen) > sealed.data.size
    assert all(
        sealed.data[block, at : at + 16].tobytes() not in seen for block in range(8) for at in (0, 100_000)
    )
    assert np.arange(3, dtype=np.uint64).tobytes() not in seen  # nor digests


@pytest.mark.parametrize("at", [0, 4, 8, 12, 16, 40, 400_000, 700_000])
def test_a_byte_that_is_changed_on_the_way_is_noticed(
    sealed: Source, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(frames, "SILENT_S", 1.0)
    with closing(Between(sealed.door.port, at)) as between, closing(Tcp()) as tls:
        monkeypatch.setattr(sealed.door, "port", between.port)
        with pytest.raises(
            TransportFailed, match=r"modified in transit|is no frame|from block 1 on|nothing came"
        ):
            drain(tls, sealed.pull())


def test_another_role_and_another_ca_get_no_connection(sealed: Source, tmp_path: Path) -> None:
    rpc.act_as(Identity(tmp_path / "router"))
    with (
        closing(Tcp()) as tls,
        pytest.raises(TransportFailed, match="PERMISSION_DENIED: a router may not call Handoff/Connect"),
    ):
        drain(tls, sealed.pull())
    others = Authority.create(tmp_path / "other ca")
    identity.write(tmp_path / "stranger", others.issue(Name("test", Role.WORKER, "w")))
    rpc.act_as(Identity(tmp_path / "stranger"))
    with closing(Tcp()) as tls, pytest.raises(TransportFailed, match="not from this process's CA"):
        drain(tls, sealed.pull())
    rpc.act_as(None)
    with closing(Tcp()) as tls, pytest.raises(TransportFailed, match="if it speaks TLS"):
        drain(tls, sealed.pull())


def test_a_session_without_its_keys_is_worth_nothing(sealed: Source) -> None:
    """Whoever saw a greeting on its way, and is faster."""
    session = sealed.door.invite().session
    with closing(Line(knock(sealed.service.address, sealed.service.door_port))) as line:
        sealed.asks(line, frames.GREETING + session)
        with pytest.raises(frames.Broken, match="hung up"):
            assert line.receive().kind != FAIL


def test_a_replaced_certificate_makes_new_connections(sealed: Source, tmp_path: Path) -> None:
    mine = Identity(tmp_path / "puller")
    rpc.act_as(mine)
    with closing(Tcp()) as tls:
        drain(tls, sealed.pull())
        eventually(lambda: sealed.door._idle, 2, "the connection is kept")
        before = next(iter(sealed.door._idle))
        identity.write(tmp_path / "puller", Authority(tmp_path / "ca").issue(mine.name))
        assert np.array_equal(drain(tls, sealed.pull()), sealed.data)
        eventually(lambda: before not in sealed.door._idle and sealed.door._idle, 2, "another one is kept")
