"""One prompt against the index, as the policy asks for it.

Nothing is computed before it is asked: a policy looks at a handful of workers, not at all.
"""

from __future__ import annotations

import random

from baton.prefix_keys import PromptKeys
from baton.scheduler.prefixes.ledger import PrefixLedger

TIERS = 2  # lengths of the match of which workers are named: the longest, and the next


class Match:
    """One prompt against the index. Good for one placement."""

    def __init__(self, ledger: PrefixLedger, prompt: PromptKeys, prompt_tokens: int) -> None:
        """Match a prompt of so many tokens."""
        self._ledger = ledger
        self._keys, self._key_tokens = prompt
        # An engine computes at least the last token of a prompt: there is nothing to sample from otherwise.
        self._most = max(0, prompt_tokens - 1)
        self._tokens: dict[str, int] = {}

    def tokens(self, worker_id: str) -> int:
        """Return how many tokens of the prompt a worker need not compute, as far as is known."""
        found = self._tokens.get(worker_id)
        if found is None:
            slot = self._ledger.slot(worker_id)
            reached = 0 if slot is None else self._ledger.index.reach(self._keys, 1 << slot)[0]
            found = self._tokens[worker_id] = min(self._most, reached * self._key_tokens)
        return found

    def knows(self, worker_id: str) -> bool:
        """Return whether a worker tells what it holds: 0 tokens mean nothing otherwise."""
        return bool(self._keys) and worker_id in self._ledger

    def best(self, role: int, most: int, rng: random.Random) -> list[str]:
        """Return the workers of a role that hold most of the prompt, at most so many of each of TIERS."""
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
    """Return at most so many slots of a set of workers, drawn at random."""
    slots: list[int] = []
    while who and len(slots) < most:
        place = rng.randrange(who.bit_length())
        above = who >> place
        slot = place + (above & -above).bit_length() - 1  # the first one from there on
        slots.append(slot)
        who ^= 1 << slot
    return slots
