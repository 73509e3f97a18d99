"""Accept drafts and sample the token after them, in Triton; arguments are as in rows.py and cut.py.

`probs` *[D, V] and its stride, or `proposal` *[slots, steps, V] and its strides: the distributions from
which drafts were drawn; one-hot if both are None. `scales` *[N] float32, for block verification: the factor
of a row's target in its residual. `chosen` *[R] int32: the place of a request's last token. `residuals` *[R
or N, tiles] float32: the tiles' masses in the distribution of that token, for the chosen row, or for every
row if block verification needs them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: PLR0917 (device code: calls are slow; nan is not equal to itself)

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.verify.gpu.rows import (
    LEAST,
    best_of,
    clean,
    draft_at,
    inverse_of,
    is_kept,
    merge,
    slot_of,
    span,
    uniforms,
    weigh_draft,
)


@triton.jit
def _proposed(
    probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
    start, request, slot, place, draft, inverse, tiles, TILES: tl.constexpr,
):  # fmt: skip
    chance = tl.full((), 1.0, tl.float32)
    if probs is not None:
        row = start - request + place
        chance = tl.load(probs + row * probs_stride + draft, mask=draft >= 0, other=0.0).to(tl.float32)
    if proposal is not None:
        top, masses = merge(proposal_maxes, proposal_sums, start + place, tiles, TILES)
        given = proposal + slot * proposal_slot + place * proposal_step + draft
        logit = clean(tl.load(given, mask=draft >= 0, other=float("-inf")))
        chance = tl.exp(logit * inverse - top) / tl.maximum(tl.sum(masses, axis=0), LEAST)
    return chance


@triton.jit
def _accept(
    logits, stride, tokens, seeds, positions, maxes, sums, cuts, lasts, kept,
    probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums, scales,
    start, end, request, slot, inverse, vocabulary, tiles,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return how many drafts are accepted.

    With `scales`, only fill `scales`: acceptance then needs the residuals, which `_conclude` reads.
    """
    accepted = tl.zeros((), tl.int32)
    place = tl.zeros((), tl.int32)
    ratio = tl.full((), 1.0, tl.float32)
    draft = draft_at(tokens, start, end, request, place, vocabulary, PACKED)
    _, mine, others = weigh_draft(
        logits, stride, maxes, sums, cuts, lasts, kept, start, draft, inverse, tiles, TILES, SHIFT
    )
    if scales is not None:
        tl.store(scales + start, ratio)
    while draft >= 0:
        proposed = _proposed(
            probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
            start, request, slot, place, draft, inverse, tiles, TILES,
        )  # fmt: skip
        wanted = mine / tl.maximum(mine + others, LEAST)  # a row's total weight may be 0
        chance, _, _ = uniforms(seeds, positions, slot, start + place, place)
        following = draft_at(tokens, start, end, request, place + 1, vocabulary, PACKED)
        if BLOCK:
            ratio = tl.where(proposed > 0, tl.minimum(ratio * wanted / tl.maximum(proposed, LEAST), 1.0), 0.0)
            _, mine, others = weigh_draft(
                logits, stride, maxes, sums, cuts, lasts, kept,
                start + place + 1, following, inverse, tiles, TILES, SHIFT,
            )  # fmt: skip
            if scales is not None:
                tl.store(scales + start + place + 1, ratio)
            else:
                residual = ratio * others / tl.maximum(mine + others, LEAST)
                if chance < _block_chance(ratio, residual, following):
                    accepted = place + 1
        elif (proposed > 0) & (chance * proposed < wanted):
            accepted = place + 1
            _, mine, others = weigh_draft(
                logits, stride, maxes, sums, cuts, lasts, kept,
                start + place + 1, following, inverse, tiles, TILES, SHIFT,
            )  # fmt: skip
        else:
            following = tl.full((), -1, tl.int32)
        draft = following
        place += 1
    return accepted


@triton.jit
def _block_chance(ratio, residual, following):
    """Return the probability that block verification accepts here; for the last draft it is the ratio."""
    below = residual + 1 - ratio
    chance = tl.where(below > 0, residual / tl.where(below > 0, below, 1.0), 1.0)
    return tl.where(following >= 0, chance, ratio)


@triton.jit
def _conclude(
    tokens, seeds, positions, scales, residuals, start, end, request, slot, vocabulary, tiles,
    PACKED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return how many drafts block verification accepts, given its scales and residuals."""
    accepted = tl.zeros((), tl.int32)
    place = tl.zeros((), tl.int32)
    which = tl.arange(0, TILES)
    draft = draft_at(tokens, start, end, request, place, vocabulary, PACKED)
    while draft >= 0:
        row = start + place + 1
        draft = draft_at(tokens, start, end, request, place + 1, vocabulary, PACKED)
        ratio = tl.load(scales + row)
        some = tl.where(draft >= 0, tiles, 0)
        masses = tl.load(residuals + row * tiles + which, mask=which < some, other=0.0)
        chance, _, _ = uniforms(seeds, positions, slot, row - 1, place)
        if chance < _block_chance(ratio, tl.sum(masses, axis=0), draft):
            accepted = place + 1
        place += 1
    return accepted


@triton.jit
def _weights(
    logits, stride, cuts, lasts,
    probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
    start, request, slot, place, draft, inverse, tile, top, total, scale, vocabulary, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return [TILE]: one tile of the weights by which the last token is drawn.

    draft: the rejected draft of this row, or -1.
    """
    row = start + place
    here = tile * TILE + tl.arange(0, TILE)
    inside = here < vocabulary
    value = clean(tl.load(logits + row * stride + here, mask=inside, other=float("-inf")))
    weights = tl.exp(value * inverse - top)
    if cuts is not None:
        weights = tl.where(
            is_kept(value, here, tl.load(cuts + row), tl.load(lasts + row), SHIFT), weights, 0.0
        )
    if probs is not None:
        if draft >= 0:
            given = probs + (start - request + place) * probs_stride + here
            share = tl.load(given, mask=inside, other=0.0).to(tl.float32)
            weights = tl.maximum(weights * (scale / total) - share, 0.0)
    elif proposal is not None:
        if draft >= 0:
            highest, masses = merge(proposal_maxes, proposal_sums, row, tiles, TILES)
            given = proposal + slot * proposal_slot + place * proposal_step + here
            share = tl.exp(clean(tl.load(given, mask=inside, other=float("-inf"))) * inverse - highest)
            weights = tl.maximum(
                weights * (scale / total) - share / tl.maximum(tl.sum(masses, axis=0), LEAST), 0.0
            )
    else:
        weights = tl.where(here == draft, 0.0, weights)
    return tl.where(inside, weights, 0.0)


@triton.jit
def _first_beyond(weights, share, SIZE: tl.constexpr):
    """Return the first place whose cumulative weight exceeds this share of the total; -1 if all are 0."""
    order = tl.arange(0, SIZE)
    mass = tl.cumsum(weights, 0)
    goal = share * tl.max(mass, axis=0)
    first = tl.min(tl.where((weights > 0) & (mass > goal), order, SIZE), axis=0)
    last = tl.max(tl.where(weights > 0, order, -1), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit(do_not_specialize=["width"])
def accept_kernel(
    logits, stride, tokens, row_ends, slots, temperature, seeds, positions, maxes, sums, cuts, lasts, kept,
    probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
    scales, chosen,
    vocabulary, tiles,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Compute `chosen`, or `scales` instead if given; one program per request."""
    request = tl.program_id(0).to(tl.int64)
    start, end = span(row_ends, request)
    slot = slot_of(slots, request)
    heat = tl.load(temperature + slot).to(tl.float32)
    if heat == 0:
        return
    accepted = _accept(
        logits, stride, tokens, seeds, positions, maxes, sums, cuts, lasts, kept,
        probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums, scales,
        start, end, request, slot, inverse_of(heat), vocabulary, tiles, BLOCK, PACKED, TILES, SHIFT,
    )  # fmt: skip
    if scales is None:
        tl.store(chosen + request, accepted)


@triton.jit(do_not_specialize=["each", "width"])
def residual_kernel(
    logits, stride, tokens, row_ends, slots, temperature, maxes, sums, cuts, lasts, kept,
    probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
    scales, chosen, residuals,
    vocabulary, tiles, each,
    width,  # maximum rows per request if every row has programs, else 1
    PACKED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Compute the tiles' masses, for each request's chosen row or, with `scales`, for every row."""
    request = (tl.program_id(0) // width).to(tl.int64)
    start, end = span(row_ends, request)
    slot = slot_of(slots, request)
    heat = tl.load(temperature + slot).to(tl.float32)
    place = tl.program_id(0) % width
    if (heat == 0) | (start + place >= end):
        return
    into = start + place
    if scales is None:
        place = tl.load(chosen + request)
        into = request
    row = start + place
    inverse = inverse_of(heat)
    draft = draft_at(tokens, start, end, request, place, vocabulary, PACKED)
    top, mine, others = weigh_draft(
        logits, stride, maxes, sums, cuts, lasts, kept, row, draft, inverse, tiles, TILES, SHIFT
    )
    scale = tl.full((), 1.0, tl.float32)
    if scales is not None:
        scale = tl.load(scales + row)
    split = tl.program_id(1)
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        weights = _weights(
            logits, stride, cuts, lasts,
            probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
            start, request, slot, place, draft, inverse, tile, top, tl.maximum(mine + others, LEAST), scale,
            vocabulary, tiles, TILE, TILES, SHIFT,
        )  # fmt: skip
        tl.store(residuals + into * tiles + tile, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize=["width"])
def settle_kernel(
    logits, stride, tokens, row_ends, slots, temperature, seeds, positions,
    maxes, bests, sums, cuts, lasts, kept,
    probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
    scales, chosen,
    residuals,  # None for one-hot drafts without filters, where the sums suffice
    written,  # *[R, width] int32
    counts,  # *[R] int32
    vocabulary, tiles, width,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a request's tokens, drawing the last one by tile and then within it; one program per request."""
    request = tl.program_id(0).to(tl.int64)
    start, end = span(row_ends, request)
    slot = slot_of(slots, request)
    heat = tl.load(temperature + slot).to(tl.float32)
    place = tl.zeros((), tl.int32)
    if heat == 0:
        token = best_of(maxes, bests, start, tiles, TILES)
        while token == draft_at(tokens, start, end, request, place, vocabulary, PACKED):
            place += 1
            token = best_of(maxes, bests, start + place, tiles, TILES)
    else:
        inverse = inverse_of(heat)
        if residuals is None:
            place = _accept(
                logits, stride, tokens, seeds, positions, maxes, sums, cuts, lasts, kept,
                probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
                None, start, end, request, slot, inverse, vocabulary, tiles, BLOCK, PACKED, TILES, SHIFT,
            )  # fmt: skip
        elif scales is not None:
            place = _conclude(
                tokens, seeds, positions, scales, residuals, start, end, request, slot, vocabulary, tiles,
                PACKED, TILES,
            )  # fmt: skip
        else:
            place = tl.load(chosen + request)
        row = start + place
        draft = draft_at(tokens, start, end, request, place, vocabulary, PACKED)
        top, masses = merge(maxes, sums, row, tiles, TILES)
        scale = tl.full((), 1.0, tl.float32)
        total = tl.full((), 1.0, tl.float32)
        if residuals is not None:
            from_row = request
            if scales is not None:
                scale = tl.load(scales + row)
                from_row = row
            which = tl.arange(0, TILES)
            masses = tl.load(residuals + from_row * tiles + which, mask=which < tiles, other=0.0)
            _, mine, others = weigh_draft(
                logits, stride, maxes, sums, cuts, lasts, kept, row, draft, inverse, tiles, TILES, SHIFT
            )
            total = tl.maximum(mine + others, LEAST)
        _, for_tile, for_token = uniforms(seeds, positions, slot, row, place)
        tile = _first_beyond(masses, for_tile, TILES)
        weights = _weights(
            logits, stride, cuts, lasts,
            probs, probs_stride, proposal, proposal_slot, proposal_step, proposal_maxes, proposal_sums,
            start, request, slot, place, draft, inverse, tl.maximum(tile, 0), top, total, scale,
            vocabulary, tiles, TILE, TILES, SHIFT,
        )  # fmt: skip
        within = _first_beyond(weights, for_token, TILE)
        token = tile * TILE + within
        if (tile < 0) | (within < 0):  # a rounding error rejected a certain draft: take the most likely token
            token = best_of(maxes, bests, row, tiles, TILES)
    order = tl.arange(0, WIDTH)
    first = start + 1
    if PACKED:
        first -= request + 1
    accepted = tl.load(tokens + first + order, mask=order < place, other=-1).to(tl.int32)
    tl.store(written + request * width + order, tl.where(order == place, token, accepted), mask=order < width)
    tl.store(counts + request, place + 1)
