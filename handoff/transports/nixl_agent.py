"""A rank's NIXL agent: memory that peers may read, reads from peers, and the thread that serves peers.

NIXL's own progress thread would keep a core busy, so it is off: a thread that waits for a read polls it, and
the agent's thread polls for peers, often while there are offers or abandoned reads. NIXL forgets a released
read, but its bytes may still arrive, so a buffer is reused only once nothing can write to it.

Uses nixl 1.5's nixl_agent (register_memory, get_partial_agent_metadata, add_remote_agent,
remove_remote_agent, get_xfer_descs, initialize_xfer, transfer, check_xfer_state, release_xfer_handle,
get_new_notifs, backends), whose exceptions have no common base class.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from baton import rpc
from baton.handoff.errors import HandoffError, TransportFailed
from baton.handoff.records import Bytes
from baton.keeping import keep_thread

logger = logging.getLogger(__name__)

_BACKEND, _KIND = "UCX", "DRAM"  # staging and buffers are host memory
# Defaults that the environment can override. Log levels: our own errors report failures. Segment sizes: with
# UCX's 8 KiB, TCP is half as fast. Unreleased registrations: without a limit, UCX was seen to leak memory
# (vLLM sets the same limit).
_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_TCP_RX_SEG_SIZE": "64k",
    "UCX_TCP_TX_SEG_SIZE": "64k",
}
_SERVE_S = 0.001  # polling interval while there are offers
_IDLE_S = 0.1  # polling interval without offers, for peers that come late and connections that end
_LOOK_S, _LOOK_GROWTH, _LOOK_MOST_S = 0.00005, 1.2, 0.001  # polling intervals of a read
CONTACT_S = 5.0  # time for a peer's first answer
_SHUNNED_S = 60.0  # time for which an unresponsive peer is not used
_MAX_PEERS = 256  # beyond this, the least recently used idle peer is disconnected


_LINGER_S = 1.0  # time for abandoned reads to end before their peer is disconnected
_SETTLE_S = 5.0  # time after the disconnection until nothing more can arrive


@dataclass(frozen=True)
class Region:
    number: int
    memory: Bytes = field(repr=False)  # keeps it mapped
    start: int  # address
    stop: int
    metadata: bytes  # gives peers access; the first region's metadata also says how to connect


@dataclass
class _Peer:
    """A peer's agent, and the regions whose metadata is loaded."""

    regions: set[int] = field(default_factory=set)
    answered: bool = False


class State(Enum):
    """The state of a read, with NIXL's name for it."""

    UNDER_WAY = "PROC"
    THERE = "DONE"
    FAILED = "ERR"


@dataclass(eq=False)
class Read:
    peer: str
    what: str  # named in error texts
    handle: Any  # NIXL's handle
    state: State = State.UNDER_WAY
    began_s: float = field(default_factory=time.monotonic)


class Buffer:
    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self.address = int(self.data.ctypes.data)
        self.reads: list[Read] = []  # reads that may still write to the buffer

    def expect(self, read: Read) -> None:
        self.reads = [one for one in self.reads if one.state is not State.THERE]
        self.reads.append(read)

    @property
    def is_quiet(self) -> bool:
        return all(read.state is State.THERE for read in self.reads)


class Buffers:
    """The buffers that no pull uses. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.free: list[Buffer] = []
        self.left: dict[Buffer, float] = {}  # abandoned buffer -> since when, time.monotonic

    def take(self, size: int) -> Buffer | None:
        with self._lock:
            found = next((one for one in self.free if one.data.size >= size), None)
            if found is not None:
                self.free.remove(found)
            return found

    def give(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer.is_quiet:
                self.free.append(buffer)
            else:
                self.left[buffer] = time.monotonic()

    def tend(self, look: Callable[[Read], None], give_up: Callable[[Read], None]) -> None:
        """Free abandoned buffers. look: updates a read; give_up: fails it and disconnects its peer."""
        with self._lock:
            left = list(self.left.items())
        for buffer, since in left:
            age_s = time.monotonic() - since
            for read in buffer.reads:
                if read.state is State.UNDER_WAY:
                    (look if age_s < _LINGER_S else give_up)(read)
            if buffer.is_quiet or age_s >= _LINGER_S + _SETTLE_S:
                with self._lock:
                    del self.left[buffer]
                    self.free.append(buffer)


class Agent:
    """A thread-safe wrapper of NIXL, which only one thread may call at a time."""

    def __init__(self) -> None:
        """Start NIXL with UCX, which takes half a second. Raises HandoffError if that fails."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not rpc.is_open():
            # any process that reaches UCX's ports can read and write this process's memory
            os.environ["UCX_NET_DEVICES"] = "lo"
        self.name = secrets.token_hex(16)
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            config = nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._nixl: Any = nixl_agent(self.name, config)
        except Exception as error:
            raise HandoffError(f"NIXL cannot start: {type(error).__name__}: {error}") from error
        if _BACKEND not in self._nixl.backends:
            raise HandoffError(f"this NIXL has no {_BACKEND}; there are: {', '.join(self._nixl.plugin_list)}")
        self._lock = threading.Lock()  # guards calls of NIXL
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # keyed by agent; guarded by _lock
        self._reads: set[Read] = set()  # running reads; guarded by _lock
        self._shunned: dict[str, float] = {}  # unreachable agent -> until when; guarded by _lock
        self.regions: tuple[Region, ...] = ()
        self.buffers = Buffers()
        self._changed = threading.Condition()  # guards the fields below; never held while _lock is taken
        self._offered: set[Hashable] = set()
        self._closed = False
        self._thread = keep_thread(self._serve, "baton-nixl")
        self._thread.start()

    # ---- at the source

    def register(self, memory: Bytes) -> None:
        """Let peers read the memory, from now until `close`."""
        start = int(memory.ctypes.data)
        with self._lock:
            registered = self._nixl.register_memory([(start, memory.size, 0, "")], _KIND, [_BACKEND])
            first = not self.regions
            metadata = self._nixl.get_partial_agent_metadata(registered, first, [_BACKEND])
            region = Region(len(self.regions), memory, start, start + memory.size, metadata)
            self.regions = (*self.regions, region)

    def begin(self, key: Hashable) -> None:
        """Poll for peers often, until `end`."""
        with self._changed:
            self._offered.add(key)
            self._changed.notify()

    def end(self, key: Hashable) -> None:
        """Withdraw an offer. Unknown keys are ignored."""
        with self._changed:
            self._offered.discard(key)

    # ---- at the puller

    def know(self, peer: str, regions: Mapping[int, bytes], what: str) -> None:
        """Load a peer's new metadata. Raises TransportFailed."""
        if peer == self.name:
            return
        with self._lock:
            known = self._peers.setdefault(peer, _Peer()).regions
            self._peers.move_to_end(peer)
            try:
                with _named(f"{what}: NIXL refuses the metadata"):
                    for number in sorted(regions.keys() - known):
                        loaded = self._nixl.add_remote_agent(regions[number]).decode()
                        if loaded != peer:
                            raise ValueError(f"it is agent {loaded}'s")
                        known.add(number)
            except TransportFailed:
                self._forget(peer)
                raise
            if len(self._peers) > _MAX_PEERS:
                busy = {peer, *(read.peer for read in self._reads)}
                idle = next((one for one in self._peers if one not in busy), None)
                if idle is not None:
                    self._forget(idle)

    def shuns(self, peer: str) -> bool:
        """Return whether the peer recently failed to answer, perhaps because of a firewall."""
        return self._shunned.get(peer, 0.0) > time.monotonic()

    @contextlib.contextmanager
    def buffer(self, size: int) -> Iterator[Buffer]:
        """Lend a buffer of at least `size` bytes; it is not reused while reads may write to it."""
        size = 1 << (size - 1).bit_length()
        buffer = self.buffers.take(size) or self._new_buffer(size)
        try:
            yield buffer
        finally:
            self.buffers.give(buffer)
            with self._changed:
                self._changed.notify()

    def read(
        self, peer: str, pieces: Sequence[tuple[int, int]], buffer: Buffer, offset: int, what: str
    ) -> Read:
        """Read pieces (address, size) into the buffer, from `offset` on. Raises TransportFailed."""
        into, theirs, ours = buffer.address + offset, [], []
        for address, size in pieces:
            theirs.append((address, size, 0))
            ours.append((into, size, 0))
            into += size
        with self._lock:
            agent = self._nixl
            with _named(f"{what}: NIXL cannot read there"):
                handle = agent.initialize_xfer(
                    "READ", agent.get_xfer_descs(ours, _KIND), agent.get_xfer_descs(theirs, _KIND), peer
                )
            read = Read(peer, what, handle)
            buffer.expect(read)
            self._reads.add(read)
            self._learn(read, lambda: agent.transfer(handle))
        return read

    def wait(self, read: Read, check: Callable[[], None]) -> None:
        """Wait for a read. check: called between polls, and may raise. Raises TransportFailed."""
        look_s = _LOOK_S
        while not self._is_there(read):
            check()
            if time.monotonic() - read.began_s > CONTACT_S:
                self._check_contact(read)
            time.sleep(look_s)
            look_s = min(look_s * _LOOK_GROWTH, _LOOK_MOST_S)

    def close(self) -> None:
        """Release all memory and connections. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        self._thread.join()
        with self._lock:
            for peer in {*self._peers, *(read.peer for read in self._reads)}:
                self._forget(peer)
            self._nixl = None
            self.regions = ()

    def _is_there(self, read: Read) -> bool:
        with self._lock:
            if read.state is State.UNDER_WAY:
                self._learn(read, lambda: self._nixl.check_xfer_state(read.handle))
        if read.state is State.FAILED:
            raise TransportFailed(f"{read.what}: NIXL gave up the transfer")
        return read.state is State.THERE

    def _check_contact(self, read: Read) -> None:
        with self._lock:
            peer = self._peers.get(read.peer)
            if peer is not None and not peer.answered:
                self._forget(read.peer)
                raise TransportFailed(
                    f"{read.what}: no answer over NIXL within {CONTACT_S:g} s: let UCX's ports through"
                    " between the workers, or remove nixl from handoff.transports"
                )

    # ---- called with _lock

    def _learn(self, read: Read, call: Callable[[], str]) -> None:
        """Update a read's state. After a failure, disconnect the peer, so that the next pull reconnects."""
        try:
            with _named(f"{read.what}: NIXL"):
                read.state = State(call())
                if read.state is State.FAILED:
                    raise RuntimeError("the transfer failed")
                if read.state is State.THERE and (peer := self._peers.get(read.peer)) is not None:
                    peer.answered = True
        except TransportFailed:
            self._let_go(read, State.FAILED)
            self._forget(read.peer)
            raise
        if read.state is State.THERE:
            self._let_go(read, State.THERE)

    def _let_go(self, read: Read, state: State) -> None:
        self._reads.discard(read)
        read.state = state
        with contextlib.suppress(TransportFailed), _named(read.what):
            self._nixl.release_xfer_handle(read.handle)

    def _forget(self, peer: str) -> None:
        """End a peer's reads, then disconnect it: NIXL was seen to crash on reads without a connection."""
        for read in [read for read in self._reads if read.peer == peer]:
            self._let_go(read, State.FAILED)
        known, now = self._peers.pop(peer, None), time.monotonic()
        if known is not None and not known.answered:
            self._shunned = {name: until for name, until in self._shunned.items() if until > now}
            self._shunned[peer] = now + _SHUNNED_S
        if known is not None and known.regions:
            with contextlib.suppress(TransportFailed), _named(peer):  # the peer may have ended already
                self._nixl.remove_remote_agent(peer)

    # ---- buffers

    def _new_buffer(self, size: int) -> Buffer:
        buffer = Buffer(size)
        with self._lock, _named("NIXL"):
            self._nixl.register_memory([(buffer.address, size, 0, "")], _KIND, [_BACKEND])
        return buffer

    def _look(self, read: Read) -> None:
        with contextlib.suppress(TransportFailed):
            self._is_there(read)

    def _give_up(self, read: Read) -> None:
        with self._lock:
            self._let_go(read, State.FAILED)
            self._forget(read.peer)

    # ---- the thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(_SERVE_S if self._offered or self.buffers.left else _IDLE_S)
                if self._closed:
                    return
            self._answer()
            self.buffers.tend(self._look, self._give_up)

    def _answer(self) -> None:
        """Let UCX serve peers' reads, by polling for notifications, although there never are any."""
        try:
            with self._lock:
                self._nixl.get_new_notifs()
        except Exception:
            logger.exception("NIXL failed to serve its peers; trying again")
            time.sleep(_IDLE_S)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Convert NIXL's exceptions to TransportFailed."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (NIXL's have no other base class)
        raise TransportFailed(f"{what}: {type(error).__name__}: {error}") from None
