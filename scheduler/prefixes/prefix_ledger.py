"""Apply the operations in workers' block logs to the index, each once and in order.

Operations are numbered: a message that leaves a gap is not applied, and the answer says where the worker must
resume. A restarted log has a later instance number and replaces everything known about the worker.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.prefix_keys import KEYS, PromptKeys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.prefixes.index import PrefixIndex

# A worker that has not reported for this many seconds and heartbeats is forgotten.
SILENT_S, SILENT_BEATS = 10.0, 3


@dataclass(slots=True)
class _Worker:
    slot: int
    instance: int
    operations: int  # applied
    heard: float  # time of `clock`


class PrefixLedger:
    """The workers in the index. Belongs to one event loop."""

    def __init__(
        self, index: PrefixIndex, clock: Callable[[], float] = time.monotonic, *, heartbeat_s: float = 0.0
    ) -> None:
        self.index = index
        self._clock = clock
        self._silent_s = max(SILENT_S, SILENT_BEATS * heartbeat_s)
        self._workers: dict[str, _Worker] = {}
        self._names: dict[int, str] = {}  # slot -> worker id
        self._roles: dict[int, int] = {}  # role -> bits of slots
        self.gaps = 0  # messages that left a gap
        self.begun = 0  # logs begun

    def hear(self, worker_id: str, message: pb.BlockOperations) -> pb.BlocksKnown:
        """Apply the new operations in a message; return how much of the log has been applied."""
        worker = self._workers.get(worker_id)
        if worker is None or message.instance > worker.instance:
            if message.first:
                self.gaps += 1
                return _known(worker)
            worker = self._begin(worker_id, message.instance)
        elif message.instance < worker.instance:
            return _known(worker)  # late
        worker.heard = self._clock()
        new = worker.operations - message.first
        if new < 0:
            self.gaps += 1
        elif operations := message.operations[new:]:
            self.index.apply(worker.slot, operations)
            worker.operations += len(operations)
        return _known(worker)

    def note(self, worker_id: str, key: int) -> None:
        """Add a block that a worker has stored and will report with its next heartbeat."""
        if (worker := self._workers.get(worker_id)) is not None and key < KEYS:
            self.index.apply(worker.slot, (key,))

    def keep(self, roles: Mapping[str, int]) -> None:
        """Forget workers that are not in `roles`, keyed by worker id, and those that do not report."""
        oldest = self._clock() - self._silent_s
        self._roles = {}
        for worker_id, worker in list(self._workers.items()):
            role = roles.get(worker_id)
            if role is None or worker.heard < oldest:
                self._forget(worker_id, worker)
            else:
                self._roles[role] = self._roles.get(role, 0) | 1 << worker.slot

    def of_role(self, role: int) -> int:
        """Return the bits of the workers that had a role when `keep` was last called."""
        return self._roles.get(role, 0) & self.index.alive

    def slot(self, worker_id: str) -> int | None:
        """Return a worker's slot in the index; None if it is unknown."""
        worker = self._workers.get(worker_id)
        return worker.slot if worker else None

    def name(self, slot: int) -> str:
        return self._names[slot]

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def _begin(self, worker_id: str, instance: int) -> _Worker:
        if known := self._workers.get(worker_id):
            self._forget(worker_id, known)
        worker = _Worker(self.index.join(), instance, 0, self._clock())
        self._workers[worker_id] = worker
        self._names[worker.slot] = worker_id
        self.begun += 1
        return worker

    def _forget(self, worker_id: str, worker: _Worker) -> None:
        del self._workers[worker_id], self._names[worker.slot]
        self.index.leave(worker.slot)


def _known(worker: _Worker | None) -> pb.BlocksKnown:
    return (
        pb.BlocksKnown(instance=worker.instance, operations=worker.operations) if worker else pb.BlocksKnown()
    )


TIERS = 2  # `best` lists the holders of this many match lengths, longest first


class Match:
    """The part of one prompt that each worker holds. Computed on demand: a policy asks about few workers."""

    def __init__(self, ledger: PrefixLedger, prompt: PromptKeys, prompt_tokens: int) -> None:
        self._ledger = ledger
        self._keys, self._key_tokens = prompt
        # An engine always computes the last token of a prompt, because it needs its logits.
        self._most = max(0, prompt_tokens - 1)
        self._tokens: dict[str, int] = {}

    def tokens(self, worker_id: str) -> int:
        """Return how many tokens of the prompt a worker holds, as far as known."""
        found = self._tokens.get(worker_id)
        if found is None:
            slot = self._ledger.slot(worker_id)
            reached = 0 if slot is None else self._ledger.index.reach(self._keys, 1 << slot)[0]
            found = self._tokens[worker_id] = min(self._most, reached * self._key_tokens)
        return found

    def knows(self, worker_id: str) -> bool:
        """Return whether a worker reports its cache; if not, 0 tokens mean unknown."""
        return bool(self._keys) and worker_id in self._ledger

    def best(self, role: int, most: int, rng: random.Random) -> list[str]:
        """Return the workers of a role that hold most of the prompt, at most `most` for each match length."""
        index = self._ledger.index
        found: list[str] = []
        among = self._ledger.of_role(role)
        for _ in range(TIERS):
            reached, who = index.reach(self._keys, among)
            if not reached:
                break
            among &= ~who
            found += (self._ledger.name(slot) for slot in _some(who, most, rng))
        return found


def _some(who: int, most: int, rng: random.Random) -> list[int]:
    slots: list[int] = []
    while who and len(slots) < most:
        place = rng.randrange(who.bit_length())
        above = who >> place
        slot = place + (above & -above).bit_length() - 1  # the lowest one from `place` on
        slots.append(slot)
        who ^= 1 << slot
    return slots
