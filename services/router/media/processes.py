"""Run decoders (`decoder`) as processes with limits. A process that exceeds them is killed and replaced.

A process handles one request's images at a time. It starts at the first use, without the router's
environment, and ends with the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
from PIL import Image

from baton.services.router.errors import Overloaded, Unsupported


class Turns:
    """`slots` for all clients, at most `each` for one; up to `waiting` requests wait; clients take turns."""

    def __init__(self, slots: int, each: int, waiting: int) -> None:
        self._free = slots
        self._each = each
        self._room = waiting
        self._taken: Counter[Hashable] = Counter()
        self._queues: OrderedDict[Hashable, dict[asyncio.Future[None], None]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises Overloaded if too many wait."""
        await self._take(client)
        try:
            yield
        finally:
            self._give(client)

    async def _take(self, client: Hashable) -> None:
        if self._room <= 0:
            raise Overloaded("too many requests with images wait to be prepared", 1.0)
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, {})[turn] = None
        self._room -= 1
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted at the same moment
                self._give(client)
            else:
                self._leave(client, turn)
            raise

    def _give(self, client: Hashable) -> None:
        self._free += 1
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._grant()

    def _grant(self) -> None:
        while self._free:
            client = next((one for one in self._queues if self._taken[one] < self._each), None)
            if client is None:
                return
            self._queues.move_to_end(client)
            turn = next(iter(self._queues[client]))
            self._leave(client, turn)
            if turn.cancelled():
                continue
            self._free -= 1
            self._taken[client] += 1
            turn.set_result(None)

    def _leave(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(client, {})
        if turn in queue:
            del queue[turn]
            self._room += 1
            if not queue:
                del self._queues[client]


class Store:
    """Room for `most` units, taken in order of arrival."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, units: int) -> None:
        """Wait until there is room for `units`, which must not exceed `most`."""
        if not self._waiting and units <= self.free:
            self.free -= units
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(units)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((units, turn))
                self.give(0)
            raise

    def give(self, units: int) -> None:
        self.free += units
        while self._waiting and self._waiting[0][0] <= self.free:
            taken, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.free -= taken
                turn.set_result(None)


SLOTS, EACH = 3, 2  # processes, and how many one client may use: a slot remains for other clients
CPU_S = 10.0  # for all images of a request; 64 megapixels of PNG take 5 s
WALL_S = 60.0  # exceeded only if the machine is too busy
_PROGRAM = Path(__file__).with_name("decoder.py")
_LINE_BYTES = 4 << 10
_END_S, _FORGET_S, _START_S = 1.0, 5.0, 30.0
_NO_PROCESS = "no process can be started to decode images"
_STRIP_PIXELS = 1 << 16
_KEPT = ("LD_LIBRARY_PATH", "PYTHONHOME")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Header:
    format: str
    width: int
    height: int
    animated: bool

    @property
    def pixels(self) -> int:
        return self.width * self.height


class Decoders:
    def __init__(self, most_pixels: int, waiting: int, cpu_s: float = CPU_S, wall_s: float = WALL_S) -> None:
        """Decode images of up to `most_pixels`, while up to `waiting` requests wait."""
        self._most_pixels = most_pixels
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._turns = Turns(SLOTS, EACH, waiting)
        self._idle: list[_Process] = []

    @contextlib.asynccontextmanager
    async def lent(self, client: Hashable) -> AsyncIterator[Lent]:
        """Wait for the client's turn and lend it a process. Raises Overloaded."""
        async with self._turns.turn(client):
            process = await self._start()
            usable = False
            try:
                async with asyncio.timeout(self._wall_s):
                    yield Lent(process, self._cpu_s)
                usable = True
            except Unsupported:
                usable = True
                raise
            except TimeoutError:
                raise Overloaded("the router is too busy to decode the images in time", 1.0) from None
            finally:
                if usable and await process.forgets():
                    self._idle.append(process)
                else:
                    await process.kill()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().kill()

    async def _start(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await process.kill()
        return await _Process.start(self._most_pixels)


class Lent:
    """A process that is lent for the images of one request."""

    def __init__(self, process: _Process, cpu_s: float) -> None:
        self._process = process
        self._cpu_s = cpu_s

    async def take(self, file: bytes) -> Header:
        """Send the next file and return its header. Raises Unsupported with the reason."""
        told = await self._process.ask({"take": len(file), "cpu_s": self._cpu_s}, file)
        self._cpu_s = 0  # the limit is for all files: 0 leaves the clock running
        return Header(**told)

    async def decode(self, number: int) -> tuple[Image.Image, bool]:
        """Return a file's pixels as RGB, and whether they were converted. Raises Unsupported."""
        told = await self._process.ask({"decode": number})
        return await self._process.pixels((told["width"], told["height"])), told["converted"]


def _environment() -> dict[str, str]:
    """Return the environment of a decoder: only where Python and Pillow are, as ours may hold keys."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT}
    return {**kept, "PYTHONPATH": str(Path(PIL.__file__).parents[1])}


class _Process:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        memory: int,
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._memory = memory

    @classmethod
    async def start(cls, most_pixels: int) -> _Process:
        """Start a process. Raises Overloaded if the machine has no room for it."""
        ours, theirs = socket.socketpair()
        memory = -1
        try:
            with theirs:
                memory = os.memfd_create("images", os.MFD_CLOEXEC)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-s", "-P", str(_PROGRAM), str(most_pixels)),
                    stdin=theirs.fileno(),
                    stdout=memory,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=_environment(),
                )
            one = cls(process, await asyncio.open_connection(sock=ours, limit=_LINE_BYTES), memory)
        except BaseException as error:  # the process, if there is one, ends with its connection
            ours.close()
            if memory >= 0:
                os.close(memory)
            if isinstance(error, OSError):
                raise Overloaded(f"{_NO_PROCESS}: {error.strerror}", 1.0) from None
            raise
        usable = False
        try:
            usable = await one.forgets(_START_S)
        finally:
            ended = 0 if usable else await one.kill()
        if not usable:
            log.error("%s: it ended with %d", _NO_PROCESS, ended)
            raise Overloaded(_NO_PROCESS, 1.0)
        return one

    @property
    def alive(self) -> bool:
        return self._memory >= 0 and self._process.returncode is None

    async def ask(self, request: dict[str, Any], file: bytes = b"") -> dict[str, Any]:
        """Return the reply. Raises Unsupported if the file is at fault, even if it ended the process."""
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            self._writer.write(file)
            await self._writer.drain()
            told = json.loads(await self._reader.readuntil(b"\n"))
            if not isinstance(told, dict):
                raise TypeError
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TypeError, ValueError):
            with contextlib.suppress(TimeoutError):  # if it has just ended, `kill` would hide its exit status
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            ended = await self.kill()
            why = "takes too long" if ended == -signal.SIGPROF else "fails"
            raise Unsupported(f"its decoding {why}") from None
        if problem := told.get("problem"):
            raise Unsupported(problem)
        return told

    async def forgets(self, within_s: float = _FORGET_S) -> bool:
        """Make the process drop all files; return whether it can be used again."""
        with contextlib.suppress(Unsupported, TimeoutError):
            async with asyncio.timeout(within_s):
                return self.alive and await self.ask({"forget": True}) == {}
        return False

    async def pixels(self, size: tuple[int, int]) -> Image.Image:
        """Return the pixels decoded last. Raises Unsupported if they are missing."""
        reading = asyncio.ensure_future(asyncio.to_thread(self._read, size))
        try:
            return await asyncio.shield(reading)
        finally:
            await asyncio.wait({reading})  # before `kill` closes the memory file that `_read` reads

    def _read(self, size: tuple[int, int]) -> Image.Image:
        """Read the pixels in strips: reading them in one piece would hold the GIL for 0.1 s.

        The file is not mapped, because a decoder that shrank it would crash this process.
        """
        width, height = size
        image = Image.new("RGB", size, None)
        rows = max(1, _STRIP_PIXELS // width)
        for top in range(0, height, rows):
            strip = width, min(rows, height - top)
            most = strip[0] * strip[1] * 3
            data = os.pread(self._memory, most, top * width * 3)
            if len(data) != most:
                raise Unsupported("its decoding fails")
            image.paste(Image.frombytes("RGB", strip, data), (0, top))
        os.ftruncate(self._memory, 0)
        return image

    async def kill(self) -> int:
        """End the process and return its status; a second call does nothing."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
            self._writer.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        return await self._process.wait()
