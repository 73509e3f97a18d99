"""The GPU form of `ngram_match`, one launch; see README.md."""

# ruff: noqa: PLR0912, PLR0917, SIM102 (device code: calls are slow, and a compile-time `if` stands alone)

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # tokens that a program compares at once: 8 per thread, in two loads of 16 bytes
_WARPS = 4
# Maximum number of programs for a small batch, in which several share a row: with 46 registers per thread, 10
# programs fit on each of an H200's 132 multiprocessors, and more would have to queue.
_PROGRAMS = 1320
_UNROLLED = 8  # tokens of an n-gram compared without a loop, so that their loads are all in flight at once


@triton.jit
def _at(
    text,  # *int32: a row
    length,
    tail,  # *int: tokens that follow the `length` of the row
    position,
    mask,
    HAS_TAIL: tl.constexpr,
):
    """Return the tokens at `position`, in the row or its tail, where `mask` is set."""
    token = tl.load(text + position, mask=mask & (position < length), other=0)
    if HAS_TAIL:
        drafted = tl.load(tail + (position - length), mask=mask & (position >= length), other=0)
        token = tl.where(position < length, token, drafted.to(tl.int32))
    return token


@triton.jit
def _compare(
    text,
    length,
    tail,
    size,
    begin,  # start of the block
    back,
    alive,
    matched,
    BLOCK: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """Compare one token further back. Return which places still match, and how long the matches are."""
    wanted = _at(text, length, tail, size - 1 - back, size > back, HAS_TAIL)
    position = begin + tl.arange(0, BLOCK) - back
    alive = alive & (position >= 0)
    token = tl.load(text + position, mask=alive & (position < length), other=0)
    if HAS_TAIL:
        if begin + BLOCK > length + back:
            token = _at(text, length, tail, position, alive, HAS_TAIL)
    alive = alive & (token == wanted)
    return alive, matched + alive.to(tl.int32)


@triton.jit
def _ngram_match_kernel(
    tokens,  # *int32 [rows, width]
    tokens_stride,
    width,
    lengths,  # *int32 [rows]
    rows,  # *int64 [batch], or nothing
    tails,  # *int [batch, TAIL], or nothing
    tails_stride,
    limits,  # *int32 [batch]
    drafts,  # *int [batch, K], written
    drafts_stride,
    counts,  # *int32 [batch], written
    workspace,  # *int64 [2, at least batch], zero before and after a launch. First row: the best match, as
    # length << 32 | position of its last token. Second row: how many programs have finished.
    workspace_stride,
    K: tl.constexpr,
    K_POWER: tl.constexpr,
    TAIL: tl.constexpr,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    UNROLLED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    row = request
    if HAS_ROWS:
        row = tl.load(rows + request).to(tl.int64)
    length = tl.load(lengths + row)
    size = length + TAIL
    limit = tl.minimum(tl.load(limits + request), K)
    if (limit <= 0) | (size <= MIN_N):
        if share == 0:
            tl.store(counts + request, 0)
        return
    # Matches end at 0 to size - 2; the row's programs take blocks of these positions in turn.
    blocks = (size - 2) // BLOCK + 1
    programs = tl.minimum(tl.num_programs(1), blocks)
    if share >= programs:
        return
    best = workspace + request
    done = best + workspace_stride
    text = tokens + row * tokens_stride
    tail = tails + request * tails_stride

    last = _at(text, length, tail, size - 1, size > 0, HAS_TAIL)
    found = tl.full([BLOCK], 0, tl.int64)
    for block in range(share, blocks, programs):
        begin = block * BLOCK
        position = begin + tl.arange(0, BLOCK)
        # Load beyond the end of the text: the row's width is usually a multiple of 16, so these loads, which
        # cover all tokens, are 16 bytes wide. The loads in _compare cover few tokens.
        token = tl.load(text + position, mask=position < width, other=0)
        if HAS_TAIL:
            if begin + BLOCK > length:
                token = _at(text, length, tail, position, position < size, HAS_TAIL)
        alive = (position < size - 1) & (token == last)
        matched = alive.to(tl.int32)
        for back in tl.static_range(1, UNROLLED):
            alive, matched = _compare(text, length, tail, size, begin, back, alive, matched, BLOCK, HAS_TAIL)
        for back in range(UNROLLED, MAX_N):
            alive, matched = _compare(text, length, tail, size, begin, back, alive, matched, BLOCK, HAS_TAIL)
        key = (matched.to(tl.int64) << 32) | position.to(tl.int64)
        found = tl.maximum(found, tl.where(matched >= MIN_N, key, 0))
    longest = tl.max(found, axis=0)
    if longest > 0:
        tl.atomic_max(best, longest)

    # Both atomics acquire and release, so the last program to count sees the results of all other programs.
    if tl.atomic_add(done, 1) == programs - 1:
        tl.atomic_xchg(done, 0)
        longest = tl.atomic_xchg(best, 0)
        if longest == 0:
            tl.store(counts + request, 0)
        else:
            start = (longest & 0xFFFFFFFF).to(tl.int32) + 1
            step = tl.arange(0, K_POWER)
            # A continuation that reaches the end of the text continues with its own first drafts.
            source = start + step % (size - start)
            token = _at(text, length, tail, source, step < limit, HAS_TAIL)
            into = drafts + request * drafts_stride + step
            tl.store(into, token.to(drafts.dtype.element_ty), mask=step < limit)
            tl.store(counts + request, limit)


def ngram_match(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    rows: torch.Tensor | None = None,
    tails: torch.Tensor | None = None,
    workspace: torch.Tensor,
) -> None:
    """Like `baton.kernels.ngram_match.ngram_match`; `workspace` is from `new_workspace`."""
    batch, k = drafts.shape
    tail = 0 if tails is None else tails.shape[1]
    _ngram_match_kernel[batch, programs_of_a_row(batch, tokens.shape[1] + tail)](
        tokens,
        tokens.stride(0),
        tokens.shape[1],
        lengths,
        limits if rows is None else rows,  # without rows, any pointer: it is never dereferenced
        limits if tails is None else tails,
        0 if tails is None else tails.stride(0),
        limits,
        drafts,
        drafts.stride(0),
        counts,
        workspace,
        workspace.stride(0),
        K=k,
        K_POWER=triton.next_power_of_2(k),
        TAIL=tail,
        MIN_N=min_n,
        MAX_N=max_n,
        UNROLLED=min(max_n, _UNROLLED),
        HAS_ROWS=rows is not None,
        HAS_TAIL=tail > 0,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def programs_of_a_row(batch: int, width: int) -> int:
    """Return how many programs share a row of up to `width` tokens."""
    return max(1, min(-(-width // _BLOCK), -(-_PROGRAMS // max(batch, 1))))
