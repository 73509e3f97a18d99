"""The transport tcp receives records over a TCP connection (frames.py)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from baton.handoff.errors import HandoffError, TransportFailed, named
from baton.handoff.frames import FAIL, FRAME_BYTES, MOST_RECORDS, PULL, RECORDS, WAIT, Broken, Frame, Line
from baton.handoff.records import Bytes, Records
from baton.handoff.transports.base import Pull, SavedShard, Transport
from baton.handoff.transports.lines import Lines
from baton.protos.handoff_pb2 import PullRequest, Shard

_BUFFERS = 4  # kept for later pulls, because fresh memory costs as much as the transfer
_KEEP_BYTES = 16 << 20  # larger ones are not kept


class Tcp(Transport):
    name: ClassVar[str] = "tcp"
    windows: ClassVar[bool] = True

    def __init__(self) -> None:
        self._lines = Lines()
        self._buffers: list[Bytes] = []
        self._lock = threading.Lock()

    def offer(self, saved: SavedShard) -> bytes:
        del saved
        return b""  # the shard's address is enough

    def reaches(self, shard: Shard) -> bool:
        return self.name in shard.offers and bool(shard.address)

    def pull(self, pull: Pull) -> Iterator[Records]:
        pull.check_time()
        most = min(
            pull.records_a_chunk, max(1, FRAME_BYTES // pull.record_bytes), MOST_RECORDS, pull.num_blocks
        )
        buffer = self._buffer(most * pull.record_bytes)
        give_back = functools.partial(self._lines.give_back, pull.shard.address)
        grip = _Grip()
        pull.cancellation.call(grip.cut)
        try:
            line, frame = self._asked(pull, most, grip)
            yield from _records(pull, line, frame, buffer, most)
            grip.let_go(give_back)
        except _Refused as refused:
            grip.let_go(give_back)
            raise refused.error from None
        except Broken as error:
            pull.check_time()
            raise TransportFailed(f"{pull.what}: {error}") from None
        finally:
            grip.close()
            self._keep(buffer)

    def close(self) -> None:
        self._lines.close()

    def _asked(self, pull: Pull, most: int, grip: _Grip) -> tuple[Line, Frame]:
        """Send the request; return the connection and the first frame of the answer.

        If an idle connection turns out to be broken, use a new one.
        """
        request = Frame(PULL, _request(pull, most).SerializeToString())
        line = self._lines.kept(pull.shard.address)
        if line is not None:
            grip.hold(line)
            try:
                line.send(request, look=pull.check_time)
                return line, _next(pull, line)
            except Broken:
                grip.close()
                pull.check_time()
        line, greeting = self._lines.make(pull)
        grip.hold(line)
        line.send(request, look=pull.check_time, before=greeting)
        return line, _next(pull, line)

    def _buffer(self, size: int) -> Bytes:
        with self._lock:
            for number, buffer in enumerate(self._buffers):
                if buffer.size >= size:
                    return self._buffers.pop(number)
        return np.empty(size, np.uint8)

    def _keep(self, buffer: Bytes) -> None:
        with self._lock:
            if buffer.size <= _KEEP_BYTES:
                self._buffers.append(buffer)
                del self._buffers[:-_BUFFERS]


class _Refused(Exception):
    """An error that the source sent; the connection stays usable."""

    def __init__(self, error: HandoffError) -> None:
        super().__init__(str(error))
        self.error = error


class _Grip:
    """A pull's current connection, which a cancellation may cut until it is let go."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._cut = False
        self._lock = threading.Lock()

    def hold(self, line: Line) -> None:
        with self._lock:
            self._line = line
            if self._cut:
                line.cut()

    def cut(self) -> None:
        """Cut the current connection, or the next one."""
        with self._lock:
            self._cut = True
            if self._line is not None:
                self._line.cut()

    def let_go(self, to: Callable[[Line], None]) -> None:
        """Hand the connection over, out of reach of cancellations."""
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            to(line)

    def close(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None


def _request(pull: Pull, most: int) -> PullRequest:
    return PullRequest(
        request_id=pull.request_id,
        epoch=pull.epoch,
        rank=pull.shard.rank,
        first_block=pull.first_block,
        num_blocks=pull.num_blocks,
        ticket=pull.shard.ticket,
        at_once=most,
    )


def _next(pull: Pull, line: Line) -> Frame:
    """Return the next frame that is not a keepalive. Raises _Refused."""
    while (frame := line.receive(pull.check_time)).kind == WAIT:
        pull.check_time()
    if frame.kind == FAIL:
        name, _, text = frame.head.decode(errors="replace").partition("\n")
        raise _Refused(named(name)(text))
    return frame


def _records(pull: Pull, line: Line, frame: Frame, buffer: Bytes, most: int) -> Iterator[Records]:
    expected, stop = pull.first_block, pull.first_block + pull.num_blocks
    while True:
        count = frame.records
        right = frame.kind == RECORDS and frame.first_block == expected
        if not right or not 0 < count <= min(most, stop - expected):
            raise TransportFailed(
                f"{pull.what}: received {frame.kind!r} with {count} records from block {frame.first_block}"
                f" on; expected blocks {expected} to {stop}, {most} at a time"
            )
        data = buffer[: count * pull.record_bytes]
        own = line.receive_records(frame, data, pull.check_time)
        yield Records(expected, data.reshape(count, pull.record_bytes), own)
        expected += count
        pull.check_time()
        if expected == stop:
            return
        frame = _next(pull, line)
