"""The compiled loops of the suffix proposer: find the last tokens' earlier occurrences and what followed.

Instead of a suffix tree there are hash chains, as in LZ77 compressors: each position of a text points to the
previous position that ends in the same token, and to the previous one that ends in the same GRAM tokens.
Adding a token costs two writes. A lookup walks both chains, newest first, up to WALK positions and FOUND
occurrences each.

Positions in a request's text are indexes. Past outputs are in a ring: positions grow forever, `position &
mask` is the index, and positions before `start` are overwritten without being unlinked.
"""

# ruff: noqa: PLR0917 (compiled code takes no keywords)

from __future__ import annotations

from typing import Any

import numpy as np

from baton.kernels.compiled import compiled

GRAM = 4  # tokens; the short chain finds shorter matches, the long one older ones
WALK = 256
FOUND = 64
END = -1  # marks the end of an output in the ring


@compiled()
def _bucket(text: Any, position: int, mask: int, size: int, buckets: int) -> int:
    """Return the chain of the `size` tokens that end at a position; `buckets` is a power of two."""
    mixed = np.int64(0)
    for back in range(size):
        mixed = mixed * np.int64(0x9E3779B1) + np.int64(text[(position - back) & mask]) + np.int64(1)
    mixed *= np.int64(0x2545F4914F6CDD1D)
    return int((mixed >> np.int64(33)) & np.int64(buckets - 1))


@compiled()
def _link(text: Any, position: int, start: int, mask: int, heads: Any, before: Any) -> None:
    """Add a position to its two chains: heads [2, buckets], before [2, text]."""
    for chain in range(2):
        size = 1 if chain == 0 else GRAM
        if position - start + 1 < size:
            before[chain, position & mask] = -1
            continue
        bucket = _bucket(text, position, mask, size, heads.shape[1])
        before[chain, position & mask] = heads[chain, bucket]
        heads[chain, bucket] = position


@compiled()
def _matched(text: Any, position: int, start: int, mask: int, context: Any, longest: int) -> int:
    """Return how many tokens up to `position` match the end of the context; at most `longest`."""
    size = context.shape[0]
    most = min(longest, size, position - start + 1)
    n = 0
    while n < most and text[(position - n) & mask] == context[size - 1 - n]:
        n += 1
    return n


@compiled()
def _occurrences(
    chain: int,
    text: Any,
    start: int,
    end: int,
    mask: int,
    heads: Any,
    before: Any,
    context: Any,
    longest: int,
    places: Any,
    lengths: Any,
    found: int,
) -> int:
    """Add occurrences of the context's end in text[start:end], from one chain; return the new `found`.

    places, lengths [2 * FOUND]: the occurrences and how many tokens match. The long chain finds matches of
    GRAM tokens and more, the short one shorter ones, so none is counted twice.
    """
    gram = GRAM if chain else 1
    size = context.shape[0]
    if min(size, longest) < gram:
        return found
    position = heads[chain, _bucket(context, size - 1, -1, gram, heads.shape[1])]
    most = found + FOUND
    for _ in range(WALK):
        if position < start or found == most:
            break
        if position + 1 < end:
            n = _matched(text, position, start, mask, context, longest)
            if n >= gram and (chain == 1 or n < GRAM or longest < GRAM):
                places[found] = position
                lengths[found] = n
                found += 1
        position = before[chain, position & mask]
    return found


@compiled()
def _follow(
    text: Any, end: int, mask: int, places: Any, active: Any, count: int, budget: int, floor: float, path: Any
) -> tuple[int, float]:
    """Write the most frequent tokens after `count` occurrences to path [budget]; return its length and score.

    Stops when the product of the tokens' frequencies falls below `floor`. The score is the sum of these
    products, which is the expected number of correct tokens.
    """
    tokens = np.empty(2 * FOUND, dtype=np.int32)
    counts = np.empty(2 * FOUND, dtype=np.int32)
    score = 0.0
    probability = 1.0
    for step in range(budget):
        kinds = 0
        total = 0
        for i in range(count):
            position = places[active[i]] + 1 + step
            token = text[position & mask] if position < end else END
            if token == END:
                continue
            total += 1
            kind = 0
            while kind < kinds and tokens[kind] != token:
                kind += 1
            if kind == kinds:
                tokens[kind] = token
                counts[kind] = 0
                kinds += 1
            counts[kind] += 1
        if total == 0:
            return step, score
        best = 0
        for kind in range(1, kinds):
            if counts[kind] > counts[best]:
                best = kind
        probability *= counts[best] / total
        if probability < floor:
            return step, score
        path[step] = tokens[best]
        score += probability
        kept = 0
        for i in range(count):
            position = places[active[i]] + 1 + step
            if position < end and text[position & mask] == tokens[best]:
                active[kept] = active[i]
                kept += 1
        count = kept
    return budget, score


@compiled()
def _best_path(
    text: Any,
    start: int,
    end: int,
    mask: int,
    heads: Any,
    before: Any,
    context: Any,
    limit: int,
    depth: int,
    factor: float,
    floor: float,
    best: Any,
) -> tuple[int, float]:
    """Write the path with the highest score of all match lengths to best [limit]; return length and score."""
    places = np.empty(2 * FOUND, dtype=np.int64)
    lengths = np.empty(2 * FOUND, dtype=np.int64)
    active = np.empty(2 * FOUND, dtype=np.int64)
    path = np.empty(limit, dtype=np.int32)
    longest = max(depth - limit, depth // 2)
    size = 0
    score = 0.0
    found = 0
    n = longest + 1
    for chain in (1, 0):
        if chain == 0 and min(limit, int((GRAM - 1) * factor)) <= score:
            break  # shorter matches cannot score more
        found = _occurrences(
            chain, text, start, end, mask, heads, before, context, longest, places, lengths, found
        )
        while True:
            shorter = 0  # the next shorter match length
            for i in range(found):
                if shorter < lengths[i] < n:
                    shorter = lengths[i]
            if shorter == 0:
                break
            n = shorter
            budget = min(limit, int(n * factor), depth - n)
            if budget <= score:
                continue  # even certain tokens would not score higher
            count = 0
            for i in range(found):
                if lengths[i] >= n:
                    active[count] = i
                    count += 1
            made, scored = _follow(text, end, mask, places, active, count, budget, floor, path)
            if scored > score:
                size, score = made, scored
                best[:made] = path[:made]
    return size, score


@compiled(
    "void(int32[:, ::1], int32[::1], int32[::1], int64[::1], int32[::1], int32[::1], int32[:, ::1], "
    "int32[:, :, ::1], int32[:, :, ::1])"
)
def learn(
    tokens: Any,
    prompts: Any,
    settled: Any,
    slots: Any,
    seen: Any,
    generated: Any,
    outputs: Any,
    heads: Any,
    before: Any,
) -> None:
    """Add to each row's slot those settled tokens of the row that the slot has not seen yet.

    tokens: [rows, width]. slots [rows]: the slot that holds the state of each row's request. State of a slot:
    seen [slots], how many tokens were added; generated [slots], how many of them are outputs; outputs
    [slots, width], those outputs; heads [slots, 2, buckets] and before [slots, 2, width], as in `_link`.
    """
    for row in range(slots.shape[0]):
        slot = slots[row]
        if settled[row] < seen[slot]:  # another request with the same id
            seen[slot] = 0
        if seen[slot] == 0:
            heads[slot, :, :] = -1
            generated[slot] = 0
        text, first, previous = tokens[row], heads[slot], before[slot]
        for position in range(seen[slot], settled[row]):
            _link(text, position, 0, -1, first, previous)
            if position >= prompts[row]:
                outputs[slot, generated[slot]] = text[position]
                generated[slot] += 1
        seen[slot] = settled[row]


@compiled(
    "void(int32[:, ::1], int32[::1], int32[::1], int64[::1], int32[:, :, ::1], int32[:, :, ::1], "
    "int32[::1], int64, int64, int32[:, ::1], int32[:, ::1], int64, float64, float64, "
    "int32[:, ::1], int32[::1])"
)
def draft(
    tokens: Any,
    lengths: Any,
    limits: Any,
    slots: Any,
    heads: Any,
    before: Any,
    ring: Any,
    start: int,
    end: int,
    ring_heads: Any,
    ring_before: Any,
    depth: int,
    factor: float,
    floor: float,
    drafts: Any,
    counts: Any,
) -> None:
    """Draft for each row of tokens [rows, width], from its own text or from ring[start:end], by score.

    lengths [rows]: valid tokens; limits [rows]: maximum drafts. Fills drafts [rows, k] and counts [rows].
    """
    other = np.empty(drafts.shape[1], dtype=np.int32)
    for row in range(slots.shape[0]):
        counts[row] = 0
        limit = min(limits[row], drafts.shape[1])
        size = lengths[row]
        if limit <= 0 or size == 0:
            continue
        text = tokens[row]
        context = text[max(0, size - depth) : size]
        slot = slots[row]
        made, score = _best_path(
            text, 0, size, -1, heads[slot], before[slot], context, limit, depth, factor, floor, drafts[row]
        )
        counts[row] = made
        if start < end:
            mask = ring.shape[0] - 1
            made, scored = _best_path(
                ring, start, end, mask, ring_heads, ring_before, context, limit, depth, factor, floor, other
            )
            if scored > score:
                drafts[row, :made] = other[:made]
                counts[row] = made


@compiled("int64(int32[::1], int64, int32[::1], int32[:, ::1], int32[:, ::1])")
def remember(output: Any, position: int, ring: Any, heads: Any, before: Any) -> int:
    """Write an output to the ring at `position`; return the position after its END."""
    mask = ring.shape[0] - 1
    first = position
    for token in output:
        ring[position & mask] = token
        _link(ring, position, first, mask, heads, before)
        position += 1
    ring[position & mask] = END
    before[0, position & mask] = -1
    before[1, position & mask] = -1
    return position + 1
