"""The transport tcp, over real sockets."""

import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest

from baton.handoff import frames
from baton.handoff.errors import PullCancelled, PullTimeout, TransportFailed, UnknownHandoff
from baton.handoff.frames import FAIL, PULL, RECORDS, SHUT
from baton.handoff.memory import segments
from baton.handoff.save import door, service
from baton.handoff.transports.tcp import Lines, Tcp
from harness.support import PATIENCE, eventually, free_ports, freeze
from tests.handoff.remote import RemoteSource
from tests.handoff.server import KEY, MIB, Rank, connect, connections, knock
from tests.handoff.transports.test_transports import drain, pull_of


@pytest.fixture
def source():
    with closing(Rank()) as made:
        yield made


@pytest.fixture
def tcp():
    with closing(Tcp()) as made:
        yield made


def ends_soon(act, within_s=2.0):
    began = time.monotonic()
    act()
    assert time.monotonic() - began < within_s * PATIENCE


# ---- records


@pytest.mark.parametrize(
    ("record_bytes", "count"), [(64, 9000), (16 << 10, 300), (384 << 10, 9), (5 * MIB // 2, 4)]
)
def test_records_of_any_size_come_whole(tcp, record_bytes, count):
    """Test many records per frame, and records larger than a frame."""
    with closing(Rank(record_bytes, count)) as source:
        source.save(count)
        got, digests = [], []
        for records in tcp.pull(source.pull()):
            assert len(records.data) == 1 or records.data.size <= frames.FRAME_BYTES
            got.append(records.data.copy())
            digests.append(records.digests.copy())
        assert np.array_equal(np.concatenate(got), source.data)
        assert np.array_equal(np.concatenate(digests), source.entry.view.digests(0, count))


def test_records_arrive_as_they_are_saved_with_keepalives_in_between(source, tcp, monkeypatch):
    """A prefill step may take longer than SILENT_S."""
    monkeypatch.setattr(frames, "SILENT_S", 2.5)
    monkeypatch.setattr(service, "WAIT_S", 0.2)
    source.save(9, there=2)
    chunks = tcp.pull(source.pull())
    assert len(next(chunks).data) == 2
    later = threading.Timer(3.2, source.come, (2, 9))
    later.start()
    assert np.array_equal(np.concatenate([one.data.copy() for one in chunks]), source.data[2:])
    later.join()


def test_memory_released_under_a_stream_stays(source, tcp):
    source.save(64)
    chunks = tcp.pull(source.pull(num_blocks=64))
    got = [next(chunks).data.copy()]
    source.staging.release(*KEY)
    got += [records.data.copy() for records in chunks]
    assert np.array_equal(np.concatenate(got), source.data)


# ---- ends


@pytest.mark.parametrize("error", [PullTimeout, PullCancelled], ids=["its deadline is moved", "cancelled"])
def test_a_waiting_pull_ends_at_once_at_both_ends(source, tcp, error):
    source.save(4, there=1)
    pull = source.pull()
    chunks = tcp.pull(pull)
    next(chunks)
    ends = (
        (setattr, (pull.cancellation, "deadline", 0.0)) if error is PullTimeout else (pull.cancellation.set,)
    )
    threading.Timer(0.2, *ends).start()
    with pytest.raises(error):
        ends_soon(lambda: next(chunks))
    eventually(source.is_quiet, 2, "the source's thread is free")


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_source_that_ends_or_stops_ends_its_pulls(own_folder, tcp, monkeypatch, killed):
    """A stopped process reads nothing, but its host still acknowledges what arrives."""
    doomed = RemoteSource()
    chunks = tcp.pull(pull_of(doomed.begin("steps", range(1, 3), whole=9)))
    next(chunks)
    monkeypatch.setattr(frames, "SILENT_S", 1.0)
    if killed:
        doomed.process.kill()
    else:
        freeze(doomed.process.pid)
    try:
        with pytest.raises(TransportFailed, match="it hung up|reset" if killed else "nothing came for 1 s"):
            ends_soon(lambda: next(chunks), 4)
    finally:
        doomed.kill()
    segments.remove_stale()


def test_a_puller_that_reads_nothing_holds_no_thread(source, monkeypatch):
    with closing(Rank(MIB, 40)) as large:
        large.save(40)
        line, greeting = connect(large.service.address)
        with closing(line):
            large.asks(line, greeting)
            eventually(lambda: not large.is_quiet(), 2, "it runs")
            monkeypatch.setattr(frames, "SLOW_S", 0.5)
            eventually(large.is_quiet, 5, "the source has given it up")


def test_the_source_limits_the_duration_of_a_pull(source, monkeypatch):
    monkeypatch.setattr(service, "MAX_PULL_S", 1.0)
    source.save(4, there=1)
    line, greeting = connect(source.service.address)
    with closing(line):
        source.asks(line, greeting)
        line.receive_records(line.receive(), np.empty(4096, np.uint8))
        with pytest.raises(frames.Broken, match="hung up"):
            line.receive()


# ---- connections


def test_a_connection_serves_pull_after_pull(source, tcp):
    source.save(4)
    for _ in range(5):
        assert np.array_equal(drain(tcp, source.pull()), source.data)
    source.staging.release(*KEY)
    with pytest.raises(UnknownHandoff):  # the connection works after a refused pull
        drain(tcp, source.pull())
    source.save(4)
    assert np.array_equal(drain(tcp, source.pull()), source.data)
    assert connections(source.service.door_port) == 1


def test_pulls_at_once_have_a_connection_each_and_few_are_kept(source, tcp):
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


def test_a_connection_that_the_source_closed_meanwhile_is_made_anew(source, tcp, monkeypatch):
    source.save(4)
    monkeypatch.setattr(door, "IDLE_S", 0.3)
    assert np.array_equal(drain(tcp, source.pull()), source.data)
    eventually(lambda: not source.door._idle and source.is_quiet(), 2, "the source has hung up")

    def unseen(lines, address):  # the loss is not noticed yet
        kept = lines._of(address).lines
        return kept.pop() if kept else None

    monkeypatch.setattr(Lines, "kept", unseen)
    assert np.array_equal(drain(tcp, source.pull()), source.data)


def test_a_source_that_restarted_at_its_address_is_found(tcp):
    port = free_ports()
    with closing(Rank(port=port)) as before:
        before.save(4)
        assert np.array_equal(drain(tcp, before.pull()), before.data)
    with closing(Rank(port=port)) as after:
        after.save(4)
        assert np.array_equal(drain(tcp, after.pull()), after.data)


def test_a_closed_port_is_named(source, tcp, monkeypatch):
    source.save(4)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(source.door, "port", port)
    with pytest.raises(TransportFailed, match=rf"port {port}.*refused; is it open .*handoff\.listen"):
        drain(tcp, source.pull())


# ---- strangers


def said(connection):
    """Return the reason with which a rank hung up."""
    connection.settimeout(10 * PATIENCE)
    whole = b""
    while piece := connection.recv(4096):
        whole += piece
    assert whole.startswith(SHUT), whole
    return whole[16:].decode()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n", "this port serves KV to workers that have a session"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "this port serves KV"),
        (frames.GREETING + bytes(16), "the session has expired, or is not this rank's"),
    ],
)
def test_connections_without_a_session_are_refused(source, words, text):
    with knock(source.service.address, source.service.door_port) as stranger:
        stranger.sendall(words)
        assert text in said(stranger)


WRONG = [
    *(
        lambda _, kind=kind: frames.Frame(kind)
        for kind in (RECORDS, frames.WAIT, FAIL, PULL, b"XXXX", bytes(4))
    ),
    lambda _: frames.Frame(PULL, bytes(70_000)),
    lambda _: frames.Frame(PULL, b"\x0a\xff"),  # a string longer than the message
    *(
        lambda source, key=key, value=value: source.wanted(**{key: value})
        for key, values in {
            "request_id": ("", "other", "r\0", "v" * 100_000),
            "epoch": (0, 2, 2**64 - 1),
            "rank": (1, 2**32 - 1),
            "first_block": (1, 4, 2**32 - 1),
            "num_blocks": (0, 5, 2**32 - 1),
            "ticket": (b"", bytes(16)),
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_requests_are_refused_and_change_nothing(source, tcp, wrong):
    source.save(4)
    line, greeting = connect(source.service.address)
    with closing(line):
        line.send(wrong(source), before=greeting)
        with suppress(frames.Broken):  # it may hang up
            assert line.receive().kind == FAIL
    assert np.array_equal(drain(tcp, source.pull()), source.data)


def test_a_session_admits_one_connection_and_expires(source, monkeypatch):
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
            assert "the session has expired" in said(again)


def test_connections_without_a_greeting_are_closed(source, monkeypatch):
    monkeypatch.setattr(door, "GREETING_S", 1.5)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(knock(source.service.address, source.service.door_port))
            for _ in range(door.STRANGERS)
        ]
        slow = silent[0]
        slow.send(frames.GREETING[:3])
        eventually(lambda: len(source.door._strangers) == door.STRANGERS, 2, "all wait")
        one_more = stack.enter_context(knock(source.service.address, source.service.door_port))
        assert said(slow) == f"{door.STRANGERS} newer connections have not sent a greeting either"
        assert {said(one) for one in [*silent[1:], one_more]} == {"no greeting within 1.5 s"}
    source.save(2)
    with closing(Tcp()) as tcp:
        assert np.array_equal(drain(tcp, source.pull()), source.data)


def test_a_slow_request_is_hung_up_on(source, monkeypatch):
    monkeypatch.setattr(service, "_REQUEST_S", 1.5)
    line, greeting = connect(source.service.address)
    with closing(line):
        line._socket.sendall(greeting + b"PULL")
        eventually(lambda: not source.is_quiet(), 2, "it is waited for")
        eventually(source.is_quiet, 3, "it is not waited for any more")
        with pytest.raises(frames.Broken, match="hung up"):
            line.receive()


def test_beyond_the_bound_the_longest_idle_connection_is_closed(source, monkeypatch):
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


def test_concurrent_pulls_are_bounded(source, tcp, monkeypatch):
    monkeypatch.setattr(door, "CALLS", 2)
    source.save(4, there=1)
    running = [tcp.pull(source.pull()) for _ in range(2)]
    for one in running:
        next(one)
    with pytest.raises(TransportFailed, match="2 pulls are running already: try again"):
        drain(tcp, source.pull())
    for one in running:
        one.close()


def test_a_connection_without_a_thread_is_refused(source, tcp, monkeypatch):
    start = threading.Thread.start

    def none_for_pulls(thread):
        if thread.name == "baton-kv-pull":
            raise RuntimeError("can't start new thread")
        start(thread)

    source.save(2)
    monkeypatch.setattr(door, "_DEAF_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_for_pulls)
        with pytest.raises(TransportFailed, match="no thread can be started"):
            drain(tcp, source.pull())
    assert not source.door._strangers
    assert np.array_equal(drain(tcp, source.pull()), source.data)
