"""Look up one prompt in the index, for the policy."""

from __future__ import annotations

import random

from baton.prefix_keys import PromptKeys
from baton.scheduler.prefixes.prefix_ledger import PrefixLedger

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
