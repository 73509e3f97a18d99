"""The transport tcp with TLS: sealed connections, and who gets one."""

import socket
import threading
from contextlib import closing, suppress

import numpy as np
import pytest

from baton import rpc
from baton.handoff import frames
from baton.handoff.errors import TransportFailed
from baton.handoff.frames import FAIL, Line
from baton.handoff.save import service
from baton.handoff.transports.tcp import Tcp
from baton.security import identity
from baton.security.authority import Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role
from harness.support import eventually
from tests.handoff.server import Rank, connections, knock
from tests.handoff.transports.test_transports import drain


@pytest.fixture
def sealed(tmp_path):
    """A source with a certificate. Afterwards, the process acts as another worker."""
    authority = Authority.create(tmp_path / "ca")
    for role, worker_id in ((Role.WORKER, "source"), (Role.WORKER, "puller"), (Role.ROUTER, "")):
        identity.write(tmp_path / (worker_id or role), authority.issue(Name("test", role, worker_id)))
    rpc.act_as(Identity(tmp_path / "source"))
    with closing(Rank(300_000, 8)) as made:
        made.save(8)
        rpc.act_as(Identity(tmp_path / "puller"))
        yield made
    rpc.act_as(None)


def test_a_sealed_connection_serves_pull_after_pull(sealed):
    with closing(Tcp()) as tls:
        for _ in range(3):
            assert np.array_equal(drain(tls, sealed.pull()), sealed.data)
        assert connections(sealed.service.door_port) == 1


class Between:
    """A man in the middle, who reads everything and may change a byte."""

    def __init__(self, port, change_at=-1):
        self._port, self._change_at = port, change_at
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.seen = bytearray()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        here, _ = self._server.accept()
        with here, socket.create_connection(("127.0.0.1", self._port)) as there:
            asking = threading.Thread(target=self._pass_on, args=(here, there))
            asking.start()
            self._pass_on(there, here, spied_on=True)
            asking.join()

    def _pass_on(self, source, to, *, spied_on=False):
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

    def close(self):
        self._server.close()
        self._thread.join(10)


def test_a_man_in_the_middle_reads_nothing(sealed, monkeypatch):
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
def test_a_byte_that_is_changed_on_the_way_is_noticed(sealed, monkeypatch, at):
    monkeypatch.setattr(frames, "SILENT_S", 1.0)
    with closing(Between(sealed.door.port, at)) as between, closing(Tcp()) as tls:
        monkeypatch.setattr(sealed.door, "port", between.port)
        with pytest.raises(
            TransportFailed,
            match=r"not what was sent|modified in transit|is not a frame|from block 1 on|nothing came",
        ):
            drain(tls, sealed.pull())


def test_another_role_and_another_ca_get_no_connection(sealed, tmp_path):
    rpc.act_as(Identity(tmp_path / "router"))
    with (
        closing(Tcp()) as tls,
        pytest.raises(TransportFailed, match="PERMISSION_DENIED: a router may not call Handoff/Connect"),
    ):
        drain(tls, sealed.pull())
    others = Authority.create(tmp_path / "other ca")
    identity.write(tmp_path / "stranger", others.issue(Name("test", Role.WORKER, "w")))
    rpc.act_as(Identity(tmp_path / "stranger"))
    with closing(Tcp()) as tls, pytest.raises(TransportFailed, match=r"not from this process's CA"):
        drain(tls, sealed.pull())
    rpc.act_as(None)
    with closing(Tcp()) as tls, pytest.raises(TransportFailed, match="if it speaks TLS"):
        drain(tls, sealed.pull())


def test_a_session_is_useless_without_its_keys(sealed, monkeypatch):
    """An eavesdropper may use a session before its owner."""
    monkeypatch.setattr(service, "_REQUEST_S", 0.5)
    session = sealed.door.invite().session
    with closing(Line(knock(sealed.service.address, sealed.service.door_port))) as line:
        sealed.asks(line, frames.GREETING + session)
        with pytest.raises(frames.Broken, match="hung up"):
            assert line.receive().kind != FAIL


def test_a_replaced_certificate_makes_new_connections(sealed, tmp_path):
    mine = Identity(tmp_path / "puller")
    rpc.act_as(mine)
    with closing(Tcp()) as tls:
        drain(tls, sealed.pull())
        eventually(lambda: sealed.door._idle, 2, "the connection is kept")
        before = next(iter(sealed.door._idle))
        identity.write(tmp_path / "puller", Authority(tmp_path / "ca").issue(mine.name))
        assert np.array_equal(drain(tls, sealed.pull()), sealed.data)
        eventually(lambda: before not in sealed.door._idle and sealed.door._idle, 2, "another one is kept")
