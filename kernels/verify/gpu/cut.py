"""Find each row's cut by min-p, top-k and top-p: gather candidates, then bisect, counting and weighing them.

A cut is the key of the smallest logit that is kept, and the last place where that logit is kept. Arguments
are as in rows.py; `found` *[N] int32: candidates per row, of which `values` and `places` *[N, room] hold up
to `room`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: PLR0912, PLR0915, PLR0917 (device code: calls are slow; nan is not equal to itself)

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.verify.gpu.rows import clean, draft_at, inverse_of, key_of, slot_of, span, weigh_draft

# Masses are summed as integers, so the order in which candidates arrive does not matter. A weight is at most
# 1, so a sum of 2**20 weights is at most 2**60.
_ONE = tl.constexpr(float(1 << 40))
# The bound is lowered by this, so that the k-th token is not lost to rounding: a product and a difference may
# be rounded together or separately.
_SLACK = tl.constexpr(1e-3)
_ALL = tl.constexpr(-(1 << 31))  # below every key


@triton.jit
def filters_of(top_k, top_p, min_p, slot, vocabulary):
    k = vocabulary + tl.zeros((), tl.int32)
    if top_k is not None:
        k = tl.load(top_k + slot).to(tl.int32)
        k = tl.where((k <= 0) | (k > vocabulary), vocabulary, k)
    p = tl.full((), 1.0, tl.float32)
    if top_p is not None:
        p = tl.load(top_p + slot).to(tl.float32)
    least = tl.full((), 0.0, tl.float32)
    if min_p is not None:
        least = tl.load(min_p + slot).to(tl.float32)
    return k, p, least


@triton.jit
def _lowest(maxes, row, tiles, vocabulary, k, p, least, top, mass, TILES: tl.constexpr):
    """Return a bound relative to the top: no token with a lower scaled logit is kept."""
    bound = tl.where(least > 0, tl.log(tl.maximum(least, 1e-30)), float("-inf"))
    if k < vocabulary:
        if k <= tiles:
            # k tiles each have a token at or above the k-th largest tile maximum.
            which = tl.arange(0, TILES)
            keys = key_of(tl.load(maxes + row * tiles + which, mask=which < tiles, other=float("-inf")), 0)
            low, high = _ALL + tl.zeros((), tl.int64), 0x7F800001 + tl.zeros((), tl.int64)
            while low + 1 < high:
                middle = (low + high) >> 1
                if tl.sum((keys >= middle).to(tl.int32), axis=0) >= k:
                    low = middle
                else:
                    high = middle
            key = low.to(tl.int32)
            value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            bound = tl.maximum(bound, value - top - _SLACK)
    elif p < 1:
        # All tokens below the bound together weigh less than 1 - p. With min-p the kept mass is unknown, but
        # at least 1, the top token's weight.
        mass = tl.where(least > 0, 1.0, mass)
        bound = tl.maximum(bound, tl.log((1 - p) * mass / vocabulary) - _SLACK)
    return bound


@triton.jit(do_not_specialize=["each", "width"])
def gather_kernel(
    logits, stride, tokens, row_ends, slots, temperature, top_k, top_p, min_p,
    maxes, sums, found, values, places,
    vocabulary, tiles, each, width, room,
    PACKED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store the candidates, in a second pass over the tiles that have any."""
    request = (tl.program_id(0) // width).to(tl.int64)
    place = tl.program_id(0) % width
    start, end = span(row_ends, request)
    row = start + place
    slot = slot_of(slots, request)
    heat = tl.load(temperature + slot).to(tl.float32)
    k, p, least = filters_of(top_k, top_p, min_p, slot, vocabulary)
    if (row >= end) | (heat == 0) | ((k == vocabulary) & (p >= 1) & (least <= 0)):
        return
    inverse = inverse_of(heat)
    draft = draft_at(tokens, start, end, request, place, vocabulary, PACKED)
    top, mine, others = weigh_draft(
        logits, stride, maxes, sums, None, None, None, row, draft, inverse, tiles, TILES, 0
    )
    bound = _lowest(maxes, row, tiles, vocabulary, k, p, least, top, mine + others, TILES)
    split = tl.program_id(1)
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        if tl.load(maxes + row * tiles + tile) - top >= bound:
            here = tile * TILE + tl.arange(0, TILE)
            value = tl.load(logits + row * stride + here, mask=here < vocabulary, other=float("-inf"))
            hit = (here < vocabulary) & (clean(value) * inverse - top >= bound)
            count = tl.sum(hit.to(tl.int32), axis=0)
            index = tl.atomic_add(found + row, count) + tl.cumsum(hit.to(tl.int32), 0) - 1
            fits = hit & (index < room)
            tl.store(values + row * room + index, value, mask=fits)
            tl.store(places + row * room + index, here, mask=fits)


@triton.jit
def _look_at(base, size, begin, bound, inverse, top, CHUNK: tl.constexpr, SHIFT: tl.constexpr):
    """Return the keys of [CHUNK] candidates, or _ALL for missing ones, and their weights."""
    index = begin + tl.arange(0, CHUNK)
    value = clean(tl.load(base + index, mask=index < size, other=float("-inf")))
    scaled = value * inverse - top
    hit = (index < size) & (scaled >= bound)
    weights = tl.where(hit, (tl.exp(scaled) * _ONE).to(tl.int64), 0)
    return tl.where(hit, key_of(value, SHIFT), _ALL), weights


@triton.jit
def _tally(
    keys, weights, base, size, bound, least_key, inverse, top, CHUNK: tl.constexpr, SHIFT: tl.constexpr
):
    """Return the number and the mass of candidates with at least this key; `keys` has the first CHUNK."""
    hit = keys >= least_key
    count = tl.sum(hit.to(tl.int32), axis=0)
    mass = tl.sum(tl.where(hit, weights, 0), axis=0)
    for begin in range(CHUNK, size, CHUNK):
        further, heavy = _look_at(base, size, begin, bound, inverse, top, CHUNK, SHIFT)
        hit = further >= least_key
        count += tl.sum(hit.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(hit, heavy, 0), axis=0)
    return count, mass


@triton.jit
def _last_of(base, places, size, gathered, key, wanted, vocabulary, CHUNK: tl.constexpr, SHIFT: tl.constexpr):
    """Return the place of the `wanted`-th candidate with this key, in vocabulary order.

    gathered: candidates stored with their places; 0 if the candidates are a whole row.
    """
    low, high = tl.full((), -1, tl.int32), vocabulary - 1 + tl.zeros((), tl.int32)
    while low + 1 < high:
        middle = (low + high) >> 1
        count = tl.zeros((), tl.int32)
        for begin in range(0, size, CHUNK):
            index = begin + tl.arange(0, CHUNK)
            value = clean(tl.load(base + index, mask=index < size, other=float("-inf")))
            where = tl.load(places + index, mask=index < gathered, other=0)
            where = tl.where(index < gathered, where, index)
            hit = (index < size) & (key_of(value, SHIFT) == key) & (where <= middle)
            count += tl.sum(hit.to(tl.int32), axis=0)
        if count >= wanted:
            high = middle
        else:
            low = middle
    return high


@triton.jit(do_not_specialize=["width"])
def cut_kernel(
    logits, stride, tokens, row_ends, slots, temperature, top_k, top_p, min_p,
    maxes, sums, found, values, places,
    cuts, lasts,  # *[N] int32, written
    kept,  # *[N] float32, written: sum of exp(scaled logit - top) over the kept tokens
    vocabulary, tiles, width, room,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Cut one row per program. If a row's candidates did not fit, read all its logits again."""
    request = (tl.program_id(0) // width).to(tl.int64)
    place = tl.program_id(0) % width
    start, end = span(row_ends, request)
    row = start + place
    slot = slot_of(slots, request)
    heat = tl.load(temperature + slot).to(tl.float32)
    if (row >= end) | (heat == 0):
        return
    k, p, least = filters_of(top_k, top_p, min_p, slot, vocabulary)
    inverse = inverse_of(heat)
    draft = draft_at(tokens, start, end, request, place, vocabulary, PACKED)
    top, mine, others = weigh_draft(
        logits, stride, maxes, sums, None, None, None, row, draft, inverse, tiles, TILES, 0
    )
    if (k == vocabulary) & (p >= 1) & (least <= 0):
        tl.store(cuts + row, _ALL)
        tl.store(lasts + row, vocabulary)
        tl.store(kept + row, mine + others)
        return
    bound = _lowest(maxes, row, tiles, vocabulary, k, p, least, top, mine + others, TILES)
    size = tl.load(found + row)
    gathered = tl.where(size <= room, size, 0)
    places += row * room
    if size <= room:
        base = values + row * room
    else:
        base = logits + row * stride
        size = vocabulary
    keys, weights = _look_at(base, size, 0, bound, inverse, top, CHUNK, SHIFT)
    count, mass = _tally(keys, weights, base, size, bound, _ALL + 1, inverse, top, CHUNK, SHIFT)
    # low: the smallest key kept so far; ties: how many tokens with that key are kept
    low = _ALL + tl.zeros((), tl.int64)
    ties = tl.zeros((), tl.int32)
    above = tl.zeros((), tl.int64)  # mass of larger keys
    each = tl.zeros((), tl.int64)  # mass of one token with key `low`
    equal = tl.zeros((), tl.int32)  # tokens with key `low`
    total = mass
    if (k < vocabulary) | (least > 0):
        wanted = tl.minimum(k, count)
        high = (0x7F800000 >> SHIFT) + 1 + tl.zeros((), tl.int64)
        while low + 1 < high:
            middle = (low + high) >> 1
            hits, _ = _tally(keys, weights, base, size, bound, middle, inverse, top, CHUNK, SHIFT)
            if hits >= wanted:
                low = middle
            else:
                high = middle
        more, mass = _tally(keys, weights, base, size, bound, low, inverse, top, CHUNK, SHIFT)
        fewer, above = _tally(keys, weights, base, size, bound, low + 1, inverse, top, CHUNK, SHIFT)
        equal = more - fewer
        each = (mass - above) // tl.maximum(equal, 1)
        ties = wanted - fewer
        total = above + each * ties
    else:
        total = ((mine + others).to(tl.float64) * _ONE).to(tl.int64)
    if p < 1:
        goal = (p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        if (low == _ALL) | (above >= goal):
            high = (0x7F800000 >> SHIFT) + 1 + tl.zeros((), tl.int64)
            while low + 1 < high:
                middle = (low + high) >> 1
                _, heavier = _tally(keys, weights, base, size, bound, middle, inverse, top, CHUNK, SHIFT)
                if heavier >= goal:
                    low = middle
                else:
                    high = middle
            more, mass = _tally(keys, weights, base, size, bound, low, inverse, top, CHUNK, SHIFT)
            fewer, above = _tally(keys, weights, base, size, bound, low + 1, inverse, top, CHUNK, SHIFT)
            equal = more - fewer
            each = (mass - above) // tl.maximum(equal, 1)
            ties = equal
        needed = (goal - above + each - 1) // tl.maximum(each, 1)
        ties = tl.maximum(tl.minimum(ties, needed.to(tl.int32)), 1)
        total = above + each * ties
    last = vocabulary + tl.zeros((), tl.int32)
    if ties < equal:
        last = _last_of(base, places, size, gathered, low.to(tl.int32), ties, vocabulary, CHUNK, SHIFT)
    tl.store(cuts + row, low.to(tl.int32))
    tl.store(lasts + row, last)
    tl.store(kept + row, (total.to(tl.float64) / _ONE).to(tl.float32))
