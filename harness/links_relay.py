"""The relay of harness/links.py: it delays or drops the Ethernet frames between hosts.

It reads commands as JSON lines and answers each with a line, {"passed": n, "lost": n, "cut": n, "full": n}:
    {"join": name, "pid": n, "mac": address}   make the device `wire` in that process's network namespace
    {"delay_s": s, "loss": share, "seed": n}   delay and drop every frame like this
    {"cut": [[a, b], ...]}                     block these pairs, and only these
    {"count": true}
It ends when its standard input does, which removes the devices.

All frames wait equally long in one queue, so their order never changes. Each direction between two hosts has
a limited share of the queue; frames beyond it are dropped, as at a full switch.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

DEVICE = "wire"
FRAME = 2048  # bytes per read, more than a frame
BURST = 64  # frames read from one device at a time
QUEUED_BYTES = 4 << 20  # limit for one direction between two hosts: 50 ms at 640 Mbit/s
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


@dataclass(frozen=True)
class _Waiting:
    due: float
    source: str
    to: str
    frame: bytes


class Relay:
    def __init__(self) -> None:
        self._devices: dict[str, int] = {}  # host -> file descriptor
        self._hosts: dict[int, str] = {}  # file descriptor -> host
        self._by_mac: dict[bytes, str] = {}
        self._cut: set[frozenset[str]] = set()
        self._delay_s = self._loss = 0.0
        self._random = random.Random(0)
        self._queue: deque[_Waiting] = deque()
        self._queued: Counter[tuple[str, str]] = Counter()  # bytes
        self._counts: Counter[str] = Counter()
        self._poll = select.epoll()

    def serve(self, commands: int) -> None:
        """Relay frames until standard input ends."""
        self._poll.register(commands, select.EPOLLIN)
        text = b""
        while True:
            for file, _ in self._poll.poll(self._wait_s()):
                if file != commands:
                    self._read(file)
                    continue
                piece = os.read(commands, FRAME)
                if not piece:
                    return
                *lines, text = (text + piece).split(b"\n")
                for line in lines:
                    print(json.dumps(self._obey(json.loads(line))), flush=True)
            self._send_due()

    def _wait_s(self) -> float:
        return max(0.0, self._queue[0].due - time.monotonic()) if self._queue else -1

    def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if "join" in command:
            self._join(command["join"], command["pid"], bytes.fromhex(command["mac"].replace(":", "")))
        elif "cut" in command:
            self._cut = {frozenset(pair) for pair in command["cut"]}
        elif "count" not in command:
            self._delay_s, self._loss = command["delay_s"], command["loss"]
            self._random.seed(command["seed"])
        return {name: self._counts[name] for name in ("passed", "lost", "cut", "full")}

    def _join(self, name: str, pid: int, mac: bytes) -> None:
        own, other = (os.open(f"/proc/{one}/ns/net", os.O_RDONLY) for one in ("self", pid))
        try:
            _enter(other)
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TAP | _IFF_NO_PI))
        finally:
            _enter(own)
            os.close(own)
            os.close(other)
        self._devices[name], self._hosts[file], self._by_mac[mac] = file, name, name
        self._poll.register(file, select.EPOLLIN)

    def _read(self, file: int) -> None:
        source = self._hosts[file]
        for _ in range(BURST):
            try:
                frame = os.read(file, FRAME)
            except BlockingIOError:
                return
            except OSError:  # its host is gone
                self._poll.unregister(file)
                return
            if to := self._by_mac.get(frame[:6]):
                self._take(source, to, frame)

    def _take(self, source: str, to: str, frame: bytes) -> None:
        if self._cut and frozenset((source, to)) in self._cut:
            self._counts["cut"] += 1
        elif self._loss and self._random.random() < self._loss:
            self._counts["lost"] += 1
        elif not self._delay_s and not self._queue:
            self._send(to, frame)
        elif self._queued[source, to] + len(frame) > QUEUED_BYTES:
            self._counts["full"] += 1
        else:
            self._queued[source, to] += len(frame)
            self._queue.append(_Waiting(time.monotonic() + self._delay_s, source, to, frame))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0].due <= now:
            one = self._queue.popleft()
            self._queued[one.source, one.to] -= len(one.frame)
            self._send(one.to, one.frame)

    def _send(self, to: str, frame: bytes) -> None:
        with suppress(OSError):  # its host is gone, or its queue is full
            os.write(self._devices[to], frame)
            self._counts["passed"] += 1


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


if __name__ == "__main__":
    Relay().serve(sys.stdin.fileno())
