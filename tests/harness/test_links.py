import contextlib
import socket
import threading
import time

import pytest

from harness.links import Links, Wire, address, why_not
from harness.netns import Network

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
PORT = 7000


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    with Network(tmp_path_factory.mktemp("links")) as network, Links() as links:
        hosts = {name: network.host(name) for name in ("a", "b", "c")}
        for host in hosts.values():
            links.join(host)
        yield links, hosts


def pings(a, b, count, *, every_s=0.002):
    """Send datagrams and return the round trips, in ms, of those that came back."""
    with b.inside():
        far = socket.socket(type=socket.SOCK_DGRAM)
    with a.inside():
        near = socket.socket(type=socket.SOCK_DGRAM)
    with near, far:
        far.bind((address(b), PORT))
        near.connect((address(b), PORT))

        def echo():
            while len(piece := far.recvfrom(64)[0]):
                far.sendto(piece, (address(a), near.getsockname()[1]))

        echoing = threading.Thread(target=echo)
        echoing.start()
        sent = []
        trips = []

        def receive():
            with contextlib.suppress(TimeoutError):
                while len(trips) < count:
                    number = int(near.recv(64))
                    trips.append((time.monotonic() - sent[number]) * 1e3)

        near.settimeout(2)
        receiving = threading.Thread(target=receive)
        receiving.start()
        for number in range(count):
            sent.append(time.monotonic())
            near.send(str(number).encode())
            time.sleep(every_s)
        receiving.join(10)
        with b.inside(), socket.socket(type=socket.SOCK_DGRAM) as last:
            last.sendto(b"", (address(b), PORT))
        echoing.join(10)
    return trips


def mib_per_s(a, b, mib):
    """Return the rate of one connection from `a` to `b`."""
    with b.inside():
        listener = socket.create_server((address(b), PORT))

    def send():
        with a.inside(), socket.create_connection((address(b), PORT), 10) as one:
            one.sendall(bytes(mib << 20))

    sender = threading.Thread(target=send)
    # The clock starts before the sender, or bytes that arrive before the reader runs would seem fast.
    began, got = time.monotonic(), 0
    sender.start()
    with listener, listener.accept()[0] as one:
        one.settimeout(30)
        while piece := len(one.recv(1 << 18)):
            got += piece
        took = time.monotonic() - began
    sender.join(10)
    assert got == mib << 20
    return mib / took


def test_frames_are_delayed_as_the_wire_says(links):
    wires, hosts = links
    wires.be(Wire())
    assert min(pings(hosts["a"], hosts["b"], 20)) < 5
    wires.be(Wire(delay_ms=20))
    trips = pings(hosts["a"], hosts["b"], 20, every_s=0.01)
    assert len(trips) == 20
    assert 40 <= min(trips) < 60


def test_a_rate_is_held_and_loss_is_mended_by_tcp(links):
    wires, hosts = links
    wires.be(Wire(rate_mbit=40))
    rates = [mib_per_s(hosts["a"], hosts["b"], 4) for _ in range(3)]
    assert max(rates) < 6
    assert max(rates) > 2.5  # a busy machine does not always use the link
    wires.be(Wire(delay_ms=1, loss=0.01))
    assert mib_per_s(hosts["a"], hosts["b"], 2) > 0.2
    wires.be(Wire(loss=0.1))
    before = wires.counts()["lost"]
    assert 30 < 300 - len(pings(hosts["a"], hosts["b"], 300)) < 90  # 19 % of the round trips
    assert wires.counts()["lost"] - before >= 30


def test_a_cut_is_between_two_alone_and_heals(links):
    wires, hosts = links
    wires.be(Wire())
    a, b, c = hosts.values()
    with b.inside():
        listener = socket.create_server((address(b), PORT))
    with (
        listener,
        a.inside(),
        socket.create_connection((address(b), PORT), 5) as one,
        listener.accept()[0] as far,
    ):
        with wires.cut(("a", "b")):
            one.send(b"x")
            assert not pings(a, b, 3)
            assert len(pings(a, c, 3)) == len(pings(c, b, 3)) == 3
            far.settimeout(0.2)
            with pytest.raises(TimeoutError):
                far.recv(1)
        far.settimeout(10)
        assert far.recv(1) == b"x"  # TCP retransmits
    assert len(pings(a, b, 3)) == 3
    with pytest.raises(ValueError, match="not joined: d"), wires.cut(("a", "d")):
        pass
