"""Draft with suffixes: the most frequent continuation of the last tokens, in this request and past outputs.

This is SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975), with the parameters of vLLM's method of that
name. The longer the match, the longer the draft, until the frequencies of its tokens make it improbable.
Arctic Inference's implementation has no wheels, and cannot continue tokens that are not verified yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from baton.services.decode.proposers.drafting import DraftBatch, Ints, Proposal, Proposer
from baton.services.decode.proposers.hosted import TokenMethod
from baton.services.decode.proposers.method import SUFFIXES
from baton.services.speculation import SpeculativeSettings

# Limit on all past outputs together, whatever max_cached_requests is: 12 bytes per token, 50 MB in all.
MOST_PAST_TOKENS = 1 << 22
_TOKENS_AN_OUTPUT = 1024  # assumed length of an output, for the size of the ring
_FEWEST_BUCKETS, _MOST_BUCKETS = 1 << 8, 1 << 16
_LAST_POSITION = 1 << 30  # positions restart beyond this, within 32 bits


class Suffix(TokenMethod):
    name: ClassVar[str] = "suffix"

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        del spec
        return SUFFIXES

    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer:
        return suffix_proposer(spec, vllm_config)


def suffix_proposer(spec: SpeculativeSettings, vllm_config: Any) -> SuffixProposer:
    return SuffixProposer(
        Tree.of(spec),
        rows=vllm_config.scheduler_config.max_num_seqs,
        width=vllm_config.model_config.max_model_len,
        most=spec.limit,
        past=spec.suffix_decoding_max_cached_requests,
    )


@dataclass(frozen=True)
class Tree:
    depth: int  # maximum tokens of a suffix and its draft together
    factor: float  # drafted tokens per token of the suffix
    floor: float  # minimum estimated probability of a draft

    @classmethod
    def of(cls, spec: SpeculativeSettings) -> Tree:
        return cls(
            depth=spec.suffix_decoding_max_tree_depth,
            factor=spec.suffix_decoding_max_spec_factor,
            floor=spec.suffix_decoding_min_token_prob,
        )


class SuffixProposer:
    """A Proposer with an index of each request (12 bytes per token) and one of past outputs."""

    def __init__(self, tree: Tree, *, rows: int, width: int, most: int, past: int) -> None:
        """Make room for `rows` requests of `width` tokens, drafts of `most` tokens, and `past` outputs."""
        from baton.services.decode.proposers import suffix_index  # compiles at import

        self._loops = suffix_index
        self._tree = tree
        buckets = _power_of_two(width // 2, _FEWEST_BUCKETS, _MOST_BUCKETS)
        # Pages of memory are allocated only when they are first written.
        self._heads: Ints = np.empty((rows, 2, buckets), dtype=np.int32)
        self._before: Ints = np.empty((rows, 2, width), dtype=np.int32)
        self._outputs: Ints = np.empty((rows, width), dtype=np.int32)
        self._seen: Ints = np.zeros(rows, dtype=np.int32)
        self._generated: Ints = np.zeros(rows, dtype=np.int32)
        self._slots = Slots(rows)
        self._past = PastOutputs(past, width)
        self._tokens: Ints = np.zeros((rows, most), dtype=np.int32)
        self._counts: Ints = np.zeros(rows, dtype=np.int32)

    def propose(self, batch: DraftBatch) -> Proposal:
        """Draft, in time linear in the new tokens and in the matches compared."""
        rows = len(batch.lengths)
        tokens, counts = self._tokens[:rows], self._counts[:rows]
        slots, strangers = self._slots.of(batch.request_ids)
        self._seen[strangers] = 0
        self._loops.learn(
            *(batch.tokens, batch.prompts, batch.settled, slots),
            *(self._seen, self._generated, self._outputs, self._heads, self._before),
        )
        self._loops.draft(
            *(batch.tokens, batch.lengths, batch.limits, slots, self._heads, self._before),
            *self._past.index,
            *(self._tree.depth, self._tree.factor, self._tree.floor, tokens, counts),
        )
        return Proposal(tokens, counts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Move the outputs of these requests to the past outputs."""
        for name in request_ids:
            slot = self._slots.free(name)
            if slot is not None and self._seen[slot]:
                self._past.add(self._outputs[slot, : self._generated[slot]])


class Slots:
    """A slot for each request; the least recently used one is reused."""

    def __init__(self, count: int) -> None:
        self._slots: dict[str, int] = {}
        self._free = list(range(count))
        self._last_seen = np.zeros(count, dtype=np.int64)
        self._step = 0

    def of(self, names: Sequence[str]) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Return the slot of each name, and the slots that are new. At most `count` names."""
        self._step += 1
        known = [self._slots.get(name, -1) for name in names]
        slots = np.array(known, dtype=np.int64)
        if -1 not in known:
            self._last_seen[slots] = self._step
            return slots, []
        self._last_seen[slots[slots >= 0]] = self._step
        taken = []
        for row, name in enumerate(names):
            if slots[row] < 0:
                slots[row] = self._take(name)
                taken.append(int(slots[row]))
        return slots, taken

    def free(self, name: str) -> int | None:
        """Free a request's slot and return it; None for an unknown name."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def _take(self, name: str) -> int:
        if not self._free:
            oldest = min(self._slots, key=lambda one: self._last_seen[self._slots[one]])
            self.free(oldest)
        slot = self._slots[name] = self._free.pop()
        self._last_seen[slot] = self._step
        return slot


class PastOutputs:
    """The last outputs of this engine, in a ring of tokens."""

    def __init__(self, most: int, longest: int) -> None:
        """Remember `most` outputs of at most `longest` tokens; 0 keeps none."""
        wanted = min(most * _TOKENS_AN_OUTPUT, MOST_PAST_TOKENS)
        size = _power_of_two(max(wanted, 2 * longest), 2, 1 << 62) if most else 1
        self._most = most
        self._ring: Ints = np.zeros(size, dtype=np.int32)
        self._heads: Ints = np.zeros((2, _power_of_two(size // 2, 1, 1 << 20)), dtype=np.int32)
        self._before: Ints = np.zeros((2, size), dtype=np.int32)
        self._begins: deque[int] = deque()
        self._end = 1  # positions begin at 1: a 0 in a chain ends it

    @property
    def index(self) -> tuple[Ints, int, int, Ints, Ints]:
        """Arguments of suffix_index.draft: ring, start, end, heads, before."""
        start = self._begins[0] if self._begins else self._end
        return self._ring, start, self._end, self._heads, self._before

    def add(self, output: Ints) -> None:
        """Add an output of at least two tokens."""
        from baton.services.decode.proposers.suffix_index import remember

        if not self._most or len(output) < 2:
            return
        if self._end > _LAST_POSITION:  # once in a billion tokens
            self._begins.clear()
            self._heads[:] = 0
            self._end = 1
        end = self._end + len(output) + 1
        while self._begins and (len(self._begins) >= self._most or end - self._begins[0] > len(self._ring)):
            self._begins.popleft()
        self._begins.append(self._end)
        self._end = int(remember(output, self._end, self._ring, self._heads, self._before))


def _power_of_two(wanted: int, fewest: int, most: int) -> int:
    return int(min(max(1 << max(wanted - 1, 0).bit_length(), fewest), most))
