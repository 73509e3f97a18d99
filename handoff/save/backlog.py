"""The backlog: blocks of windowed saves that have no slot yet.

A thread copies them from the engine's cache as slots come free, prompt by prompt in rotation. Until then the
engine must not write to these blocks: `withhold` is called before a step that may overwrite blocks of
preempted prompts, and a finished request's blocks are freed when `copied` returns the request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.handoff import windows
from baton.handoff.errors import HandoffError
from baton.handoff.groups import Part
from baton.handoff.memory.cache import BlockCache
from baton.handoff.memory.streams import Mark
from baton.handoff.reports import Key
from baton.handoff.save.staging import Entry, Staging
from baton.keeping import keep_thread

logger = logging.getLogger(__name__)

TURN_BYTES = 16 << 20  # copied per turn; between turns, preemptions can proceed
_WITHHOLD_S = 30.0  # limit for a turn, which takes milliseconds


@dataclass(eq=False)
class _Stream:
    """One save. Invariant: `reached` is the place after all copied and waiting records."""

    entry: Entry
    waiting: deque[tuple[Part, Mark | None]] = field(default_factory=deque)
    reached: int = 0
    copying: bool = False

    def next_turn(self) -> tuple[Part, Mark | None] | None:
        entry, start = self.entry, self.entry.next
        most = windows.at_once(TURN_BYTES // entry.record_bytes, entry.slots, entry.num_blocks)
        room = min(entry.room, most)
        while self.waiting and self.waiting[0][0].stop <= start:  # skip unwanted records
            self.waiting.popleft()
        if self.copying or not self.waiting or room <= 0:
            return None
        part, mark = self.waiting.popleft()
        part = part.within(start, part.stop)
        now = part.within(part.first, part.first + room)
        if now.stop < part.stop:
            self.waiting.appendleft((part.within(now.stop, part.stop), mark))
        return now, mark


class Backlog:
    """See the module's docstring. Thread-safe."""

    def __init__(self, cache: BlockCache, staging: Staging) -> None:
        self._cache = cache
        self._staging = staging
        self._streams: dict[Key, _Stream] = {}  # next turn first
        self._leaving: set[Key] = set()  # finished requests whose blocks are still needed
        self.on_copied: Callable[[], object] = lambda: None  # called when blocks of `_leaving` may be freed
        self._changed = threading.Condition()
        self._closed = False
        staging.on_room = self._look
        self._thread = keep_thread(self._copy, "baton-backlog")
        self._thread.start()

    def add(self, entry: Entry, parts: Sequence[Part], mark: Mark | None) -> None:
        """Queue records of a published entry, written before `mark`. Raises UnknownHandoff, LeaseExpired."""
        self._staging.check(entry)
        with self._changed:
            stream = self._streams.get(entry.key)
            if stream is None or stream.entry is not entry:
                stream = self._streams[entry.key] = _Stream(entry)
            for part in parts:
                stream.waiting.append((part, mark))
                stream.reached = part.stop
            self._changed.notify_all()

    def reached(self, entry: Entry) -> int:
        """Return the place of the first record that is neither copied nor waiting."""
        with self._changed:
            stream = self._streams.get(entry.key)
            return stream.reached if stream is not None and stream.entry is entry else entry.filled

    def withhold(self, keys: Iterable[Key]) -> None:
        """Drop waiting blocks that will be recomputed. Raises HandoffError if a copy does not end."""
        with self._changed:
            streams = [self._streams[key] for key in keys if key in self._streams]
            for stream in streams:
                stream.waiting.clear()
            done = self._changed.wait_for(lambda: not any(one.copying for one in streams), _WITHHOLD_S)
            for stream in streams:
                stream.reached = stream.entry.filled
        if not done:
            raise HandoffError(f"KV of a preempted request is still being copied after {_WITHHOLD_S:g} s")

    def leave(self, keys: Iterable[Key]) -> None:
        """Retain the blocks of these finished requests until `copied` returns the requests."""
        with self._changed:
            self._leaving.update(keys)

    def copied(self) -> list[Key]:
        """Return the finished requests whose blocks can now be freed, each request once."""
        with self._changed:
            self._drop_ended()
            done = [key for key in self._leaving if self._is_idle(key)]
            for key in done:
                self._leaving.remove(key)
                self._streams.pop(key, None)
            return done

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _look(self) -> None:
        with self._changed:
            self._drop_ended()
            told = any(self._is_idle(key) for key in self._leaving)
            self._changed.notify_all()
        if told:
            self.on_copied()

    def _is_idle(self, key: Key) -> bool:
        stream = self._streams.get(key)
        return stream is None or not (stream.waiting or stream.copying)

    def _drop_ended(self) -> None:
        for key, stream in list(self._streams.items()):
            if stream.entry.ended:
                stream.waiting.clear()
                if not stream.copying:
                    del self._streams[key]

    def _copy(self) -> None:
        while True:
            with self._changed:
                while (turn := self._next()) is None and not self._closed:
                    self._changed.wait()
                if turn is None or self._closed:
                    return
                stream, part, mark = turn
                stream.copying = True
            try:
                fill = self._staging.filling(stream.entry, part.first, part.stop)
                self._cache.fill((part,), fill, mark)
            except HandoffError as error:
                logger.info("KV of request %r is not copied: %s", stream.entry.request_id, error)
            except Exception:  # a device error; closing the fill reports it to pullers
                logger.exception("KV of request %r could not be copied", stream.entry.request_id)
            with self._changed:
                stream.copying = False
            self._look()

    def _next(self) -> tuple[_Stream, Part, Mark | None] | None:
        """Return the next turn, and move its save to the end of the rotation."""
        for key, stream in self._streams.items():
            if not stream.entry.ended and (turn := stream.next_turn()) is not None:
                self._streams[key] = self._streams.pop(key)
                return stream, *turn
        return None
