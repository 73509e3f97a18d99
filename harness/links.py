"""Wires between hosts of harness/netns.py, with delay, loss, a rate limit, and cuts between two hosts.

    with Network(tmp_path) as network, Links() as links:
        a, b = (links.join(network.host(name)) for name in ("a", "b"))  # their addresses on the wires
        links.be(Wire(delay_ms=10, loss=0.01, rate_mbit=100))
        with links.cut(("a", "b")):  # nothing passes
            ...

Each host that joins gets a second device, `wire`, with its own address. All frames between these devices pass
one process (harness/links_relay.py), which delays and drops them, because not every kernel has netem. The
bridge remains an ideal network for clients and observers. A token bucket (tbf) on each device limits the
rate. A cut is silent, as if a router in between failed: neighbours' hardware addresses are static, so no ARP
failure tells the sender.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import netns
from harness.links_relay import DEVICE
from harness.netns import DIE_WITH_PARENT, END_S, Host

MTU = 1500
QUEUE_MS = 50  # the queue of a device with a limited rate


def why_not() -> str:
    """Return why this machine cannot make such wires, or ""."""
    if not Path("/dev/net/tun").exists():
        return "no TAP devices here: /dev/net/tun is missing"
    return netns.why_not()


@dataclass(frozen=True)
class Wire:
    """The path between any two hosts; ideal by default."""

    delay_ms: float = 0.0  # one way
    loss: float = 0.0  # share of the frames, one way
    rate_mbit: float = 0.0  # send limit of each host; 0: none


class Links:
    """The wires of a network's hosts."""

    def __init__(self) -> None:
        self._relay: subprocess.Popen[bytes] | None = None
        self._members: dict[str, Host] = {}
        self._wire = Wire()
        self._cut: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        command = [*DIE_WITH_PARENT, sys.executable, "-m", "harness.links_relay"]
        root = Path(__file__).parent.parent
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate(timeout=END_S)

    def join(self, host: Host) -> str:
        """Connect a host to the others and return its address on the wires."""
        self._ask(join=host.name, pid=host.pid, mac=_mac(host))
        self._members[host.name] = host
        self._on(
            host,
            f"link set {DEVICE} address {_mac(host)} mtu {MTU} up",
            f"address add {address(host)}/16 dev {DEVICE}",
        )
        for one in self._members.values():
            self._on(one, *(_neighbour(other) for other in self._members.values() if other is not one))
        self._limit(host)
        return address(host)

    def be(self, wire: Wire) -> None:
        """Give all links the delay, loss and rate of `wire`."""
        self._wire = wire
        self._ask(delay_s=wire.delay_ms / 1e3, loss=wire.loss, seed=1)
        for host in self._members.values():
            self._limit(host)

    @contextmanager
    def cut(self, *pairs: tuple[str, str]) -> Iterator[None]:
        """Let nothing pass between the two hosts of each pair, in either direction."""
        before = self._cut
        self._be_cut([*before, *pairs])
        try:
            yield
        finally:
            self._be_cut(before)

    def counts(self) -> dict[str, int]:
        """Return the numbers of frames so far: passed, lost, cut, full (dropped because a queue was full)."""
        return self._ask(count=True)

    def _be_cut(self, pairs: list[tuple[str, str]]) -> None:
        if unknown := {name for pair in pairs for name in pair} - self._members.keys():
            raise ValueError(f"not joined: {', '.join(sorted(unknown))}")
        self._cut = pairs
        self._ask(cut=pairs)

    def _limit(self, host: Host) -> None:
        rate = self._wire.rate_mbit
        queue = f"tbf rate {rate:g}mbit burst 64kb latency {QUEUE_MS}ms" if rate else "pfifo limit 1000"
        _checked(host, ["tc", "qdisc", "replace", "dev", DEVICE, "root", *queue.split()])

    def _on(self, host: Host, *commands: str) -> None:
        if commands:
            _checked(host, ["sh", "-ec", "\n".join(f"ip {command}" for command in commands)])

    def _ask(self, **command: Any) -> dict[str, int]:
        relay = self._relay
        if relay is None or relay.stdin is None or relay.stdout is None:
            raise RuntimeError("enter the Links first")
        relay.stdin.write(json.dumps(command).encode() + b"\n")
        relay.stdin.flush()
        line = relay.stdout.readline()
        if not line:
            raise AssertionError(f"the relay ended with {relay.wait(END_S)}")
        return dict(json.loads(line))


def address(host: Host) -> str:
    return host.address.replace("10.77.", "10.78.", 1)


def _mac(host: Host) -> str:
    return f"02:00:00:01:00:{int(host.address.rpartition('.')[2]):02x}"


def _neighbour(host: Host) -> str:
    return f"neighbour replace {address(host)} lladdr {_mac(host)} dev {DEVICE} nud permanent"


def _checked(host: Host, command: list[str]) -> None:
    done = host.run(command, END_S)
    if done.returncode:
        raise AssertionError(f"{host.name}: {' '.join(command)}: {done.stderr}")
