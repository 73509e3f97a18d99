"""How a save lies in shared memory, as its writer and its readers see it.

    ... digest 1, digest 0 | ticket, whole, padding to 64 bytes | record 0, record 1, ...
                                                                ^ Shard.offset

Ticket: a number made of request and epoch, written at publication and wiped before the place is used again. A
reader in another process that finds it before and after its copy knows that the bytes held still meanwhile
(the idea of a sequence lock). Whole: so many records, the first ones, and their digests can be read. It grows
while an accelerator's KV is still on its way down, so that the first chunk is sent while the next is packed.
The digests stand backwards, so that a reader finds them without knowing how many there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.handoff.arena import ALIGNMENT, align
from baton.handoff.digests import Digests
from baton.handoff.errors import SaveFailed
from baton.handoff.segments import Bytes

_WORD = 8
_FAILED = np.uint64(2**64 - 1)
_LOOK_S = 0.0001  # a chunk of 4 MiB is down in about as long


def place_bytes(num_blocks: int, record_bytes: int) -> int:
    """What a save takes."""
    return records_at(num_blocks) + num_blocks * record_bytes


def records_at(num_blocks: int) -> int:
    """Where in its place the first record begins."""
    return align(num_blocks * _WORD) + ALIGNMENT


def inside(memory: Bytes, offset: int, num_blocks: int, record_bytes: int) -> bool:
    """Whether a save of so many records, at least, can begin at `offset` of that memory."""
    aligned = offset % ALIGNMENT == 0 and offset >= records_at(num_blocks)
    return aligned and offset + num_blocks * record_bytes <= memory.size


class View:
    """Of one save. Reading and writing take no lock: one process writes, each number at once."""

    def __init__(self, memory: Bytes, offset: int) -> None:
        """memory: a segment or a place in it; offset: of the first record."""
        self._memory = memory
        self._offset = offset
        start = offset - ALIGNMENT
        self._header: Digests = memory[start : start + 2 * _WORD].view(np.uint64)

    @property
    def ticket(self) -> int:
        return int(self._header[0])

    @ticket.setter
    def ticket(self, value: int) -> None:
        self._header[0] = value

    @property
    def whole(self) -> int:
        """Records that can be read."""
        return int(self._header[1])

    @whole.setter
    def whole(self, value: int) -> None:
        self._header[1] = value

    def fail(self) -> None:
        """The records will never be whole."""
        self._header[1] = _FAILED

    def digests(self, first: int, stop: int) -> Digests:
        """Of records `first` to `stop`: [stop - first]."""
        end = self._offset - ALIGNMENT - first * _WORD
        forwards: npt.NDArray[np.uint64] = self._memory[end - (stop - first) * _WORD : end].view(np.uint64)
        return forwards[::-1]

    def records(self, first: int, stop: int, record_bytes: int) -> Bytes:
        """[stop - first, record_bytes] uint8."""
        start = self._offset + first * record_bytes
        size = (stop - first) * record_bytes
        return self._memory[start : start + size].reshape(stop - first, record_bytes)

    def wait(self, count: int, what: str, check: Callable[[], None]) -> None:
        """Until the first `count` records are whole. `check` is called between looks, and may raise.

        Raises SaveFailed when they never will be.
        """
        while True:
            whole = self._header[1]
            if whole == _FAILED:
                raise SaveFailed(f"{what}: the source could not save it all")
            if whole >= count:
                return
            check()
            time.sleep(_LOOK_S)
