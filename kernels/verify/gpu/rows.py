"""Device functions shared by the Triton kernels of `verify`, and the kernel of their first pass (README.md).

Arguments: `logits` *[N, V] and `stride` of its rows; `tokens`, `row_ends`, `slots`, `temperature`, ... as in
inputs.py; `maxes`, `bests`, `sums` *[N, tiles]: for each tile of a row, the largest scaled logit, the first
token id that has it, and the sum of exp(scaled logit - largest) over all tokens except the row's draft. The
draft's weight is added where it is needed, so the probability mass of the other tokens is never computed as a
difference of two nearly equal numbers.
TILES: `tiles` rounded up to a power of 2.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: PLR0917, PLR0124 (device code: calls are slow; nan is not equal to itself)

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.verify.randomness import DOMAIN

_DOMAIN = tl.constexpr(DOMAIN)
# A lower bound on divisors that may be 0. It is a normal float32: Triton turns smaller literals, and possibly
# everything that is computed from them, into float64.
LEAST = tl.constexpr(2.0**-126)


@triton.jit
def span(row_ends, request):
    """Return the start and the end of a request's rows of logits."""
    start = tl.load(row_ends + request - 1, mask=request > 0, other=0)
    return start.to(tl.int64), tl.load(row_ends + request).to(tl.int64)


@triton.jit
def slot_of(slots, request):
    slot = request
    if slots is not None:
        slot = tl.maximum(tl.load(slots + request).to(tl.int64), 0)  # negative slots are unused padding
    return slot


@triton.jit
def draft_at(tokens, start, end, request, place, vocabulary, PACKED: tl.constexpr):
    """Return a request's draft at this place, or -1 if there is none or it is a placeholder."""
    index = start + place + 1
    if PACKED:
        index -= request + 1
    token = tl.load(tokens + index, mask=start + place + 1 < end, other=-1).to(tl.int32)
    return tl.where((token >= 0) & (token < vocabulary), token, -1)


@triton.jit
def clean(logits):
    logits = logits.to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def inverse_of(temperature):
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _uniform(word):
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23


@triton.jit
def uniforms(seeds, positions, slot, row, place):
    """Draw three numbers in (0, 1) for a row; see randomness.py."""
    seed = tl.load(seeds + slot).to(tl.int64)
    number = place.to(tl.int64)
    position = number
    if positions is not None:
        position = tl.load(positions + row).to(tl.int64)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    domain = (number * 0 + _DOMAIN).to(tl.uint32)
    first, second, third, _ = tl.philox(seed, low, high, number.to(tl.uint32), domain)
    return _uniform(first), _uniform(second), _uniform(third)


@triton.jit
def key_of(logits, SHIFT: tl.constexpr):
    """Return integers that sort like the logits. SHIFT: low bits that are 0 in logits of this dtype."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def merge(maxes, sums, row, tiles, TILES: tl.constexpr):
    """Return a row's top scaled logit, and [TILES] sums of exp(scaled logit - top) without the draft."""
    which = tl.arange(0, TILES)
    some = tl.load(maxes + row * tiles + which, mask=which < tiles, other=float("-inf"))
    masses = tl.load(sums + row * tiles + which, mask=which < tiles, other=0.0)
    top = tl.max(some, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.where(some == float("-inf"), 0.0, masses * tl.exp(some - top))


@triton.jit
def weigh_draft(
    logits,
    stride,
    maxes,
    sums,
    cuts,
    lasts,
    kept,
    row,
    draft,
    inverse,
    tiles,
    TILES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return a row's top and the weights of its draft and of all other tokens; filtered with `cuts`."""
    top, masses = merge(maxes, sums, row, tiles, TILES)
    logit = clean(tl.load(logits + row * stride + draft, mask=draft >= 0, other=float("-inf")))
    mine = tl.exp(logit * inverse - top)
    others = tl.sum(masses, axis=0)
    if cuts is not None:
        mine = tl.where(is_kept(logit, draft, tl.load(cuts + row), tl.load(lasts + row), SHIFT), mine, 0.0)
        others = tl.maximum(tl.load(kept + row) - mine, 0.0)
    return top, mine, others


@triton.jit
def is_kept(logits, places, cut, last, SHIFT: tl.constexpr):
    key = key_of(logits, SHIFT)
    return (key > cut) | ((key == cut) & (places <= last))


@triton.jit
def best_of(maxes, bests, row, tiles, TILES: tl.constexpr):
    """Return the place of a row's largest logit, the first if several are equal."""
    which = tl.arange(0, TILES)
    some = tl.load(maxes + row * tiles + which, mask=which < tiles, other=float("-inf"))
    return tl.load(bests + row * tiles + tl.argmax(some, axis=0))


@triton.jit(do_not_specialize=["each", "width"])
def stats_kernel(
    logits, stride, tokens, row_ends, slots, temperature,
    maxes, bests, sums,
    found,  # *[N] int32, set to 0; or None
    proposal, proposal_slot, proposal_step,  # drafts.logits *[slots, steps, V] and its strides; or None
    proposal_maxes, proposal_sums,  # like maxes and sums, but over all tokens
    vocabulary, tiles,
    each,  # tiles per program
    width,  # maximum rows per request
    PACKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request = (tl.program_id(0) // width).to(tl.int64)
    place = tl.program_id(0) % width
    start, end = span(row_ends, request)
    row = start + place
    if row >= end:
        return
    slot = slot_of(slots, request)
    heat = tl.load(temperature + slot).to(tl.float32)
    inverse = inverse_of(heat)
    draft = draft_at(tokens, start, end, request, place, vocabulary, PACKED)
    split = tl.program_id(1)
    if found is not None:
        tl.store(found + row, 0, mask=split == 0)
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        places = tile * TILE + tl.arange(0, TILE)
        inside = places < vocabulary
        scaled = clean(tl.load(logits + row * stride + places, mask=inside, other=float("-inf"))) * inverse
        largest, best = tl.max(scaled, axis=0, return_indices=True)
        tl.store(maxes + row * tiles + tile, largest)
        tl.store(bests + row * tiles + tile, tile * TILE + best)
        if heat > 0:
            weights = tl.exp(scaled - tl.where(largest == float("-inf"), 0.0, largest))
            tl.store(sums + row * tiles + tile, tl.sum(tl.where(places == draft, 0.0, weights), axis=0))
            if proposal is not None:
                given = proposal + slot * proposal_slot + place * proposal_step + places
                drafted = tl.where(row + 1 < end, vocabulary, 0)  # after the last draft there is no proposal
                scaled = clean(tl.load(given, mask=places < drafted, other=float("-inf"))) * inverse
                largest = tl.max(scaled, axis=0)
                weights = tl.exp(scaled - tl.where(largest == float("-inf"), 0.0, largest))
                tl.store(proposal_maxes + row * tiles + tile, largest)
                tl.store(proposal_sums + row * tiles + tile, tl.sum(weights, axis=0))
