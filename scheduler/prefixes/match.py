"""Look up one prompt in the index for the policy.

Results are computed on demand: a policy looks at a handful of workers, not at all.
"""

from __future__ import annotations

import random

from baton.prefix_keys import PromptKeys
from baton.scheduler.prefixes.ledger import PrefixLedger

TIERS = 2  # match lengths whose holders are listed: the longest, and the next


class Match:
    """Match one prompt against the index, for one placement."""

    def __init__(self, ledger: PrefixLedger, prompt: PromptKeys, prompt_tokens: int) -> None:
        """Match a prompt of `prompt_tokens` tokens."""
        self._ledger = ledger
        self._keys, self._key_tokens = prompt
        # An engine always computes the last token of a prompt, to have logits to sample from.
        self._most = max(0, prompt_tokens - 1)
        self._tokens: dict[str, int] = {}

    def tokens(self, worker_id: str) -> int:
        """Return how many tokens of the prompt a worker need not compute, as far as known."""
        found = self._tokens.get(worker_id)
        if found is None:
            slot = self._ledger.slot(worker_id)
            reached = 0 if slot is None else self._ledger.index.reach(self._keys, 1 << slot)[0]
            found = self._tokens[worker_id] = min(self._most, reached * self._key_tokens)
        return found

    def knows(self, worker_id: str) -> bool:
        """Return whether a worker reports what it holds: otherwise 0 tokens mean nothing."""
        return bool(self._keys) and worker_id in self._ledger

    def best(self, role: int, most: int, rng: random.Random) -> list[str]:
        """Return the workers of a role that hold most of the prompt, at most `most` for each of TIERS."""
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
    """Return at most `most` slots of a set of workers, drawn at random."""
    slots: list[int] = []
    while who and len(slots) < most:
        place = rng.randrange(who.bit_length())
        above = who >> place
        slot = place + (above & -above).bit_length() - 1  # the first one from there on
        slots.append(slot)
        who ^= 1 << slot
    return slots
