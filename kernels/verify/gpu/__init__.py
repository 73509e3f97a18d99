"""The GPU form of `verify`: launch the Triton kernels that a job needs, without waiting; see README.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from baton.kernels.verify.gpu.cut import cut_kernel, gather_kernel
from baton.kernels.verify.gpu.rows import stats_kernel
from baton.kernels.verify.gpu.settle import accept_kernel, residual_kernel, settle_kernel
from baton.kernels.verify.inputs import Job, Verified

ROOM = 8192  # candidates stored per row for the bisection; a row with more of them is reloaded in each step
_CHUNK = 4096  # candidates that a program keeps in registers during the bisection
_PROGRAMS_A_PROCESSOR = 16  # programs of 4 warps that fit on a multiprocessor of an H100 or H200
# Low bits that are always 0 in a logit converted to float32 from this dtype.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def verify(job: Job, room: int = ROOM) -> Verified:
    """Like `baton.kernels.verify.verify`. Raises ValueError for an unsupported dtype of logits."""
    if job.logits.dtype not in _SHIFTS:
        raise ValueError(f"logits of {job.logits.dtype}: give float32, float16 or bfloat16")
    width = job.drafts.most + 1
    written = _new(job, job.requests, width, dtype=torch.int32)
    counts = _new(job, job.requests, dtype=torch.int32)
    if job.requests:
        _Launches(job, room).settle(written, counts)
    return Verified(written, counts)


class _Launches:
    """One job's arguments, and the buffers that its kernels share."""

    def __init__(self, job: Job, room: int) -> None:
        self.job = job
        self.room = room
        self.width = job.drafts.most + 1
        rows, self.vocabulary = job.logits.shape
        self.tiles = triton.cdiv(self.vocabulary, job.tile)
        self.maxes = _new(job, rows, self.tiles)
        self.bests = _new(job, rows, self.tiles, dtype=torch.int32)
        self.sums = _new(job, rows, self.tiles)
        self.one_hot = job.drafts.probs is None and job.drafts.logits is None
        self.blocks = job.method == "block" and not self.one_hot
        self.found = _new(job, rows, dtype=torch.int32) if job.filtered else None
        # The filters' cut of each row: its key, last place and mass; see cut.py.
        dtypes = (torch.int32, torch.int32, torch.float32)
        self.kept = tuple(_new(job, rows, dtype=one) if job.filtered else None for one in dtypes)
        self.constants = {
            "PACKED": job.packed,
            "TILES": triton.next_power_of_2(self.tiles),
            "SHIFT": _SHIFTS[job.logits.dtype],
        }

    def settle(self, written: torch.Tensor, counts: torch.Tensor) -> None:
        job, proposal = self.job, self._proposal()
        self._read(proposal)
        self._filter()
        scales = chosen = residuals = None
        method = {"BLOCK": job.method == "block"}
        if job.filtered or not self.one_hot:
            scales = _new(job, job.logits.shape[0]) if self.blocks else None
            chosen = _new(job, job.requests, dtype=torch.int32)
            residuals = _new(job, job.logits.shape[0] if self.blocks else job.requests, self.tiles)
            accept_kernel[job.requests,](
                *self._rows(), job.sampling.seeds, job.positions, self.maxes, self.sums, *self.kept,
                *proposal, scales, chosen, self.vocabulary, self.tiles, **method, **self.constants,
            )  # fmt: skip
            width = self.width if self.blocks else 1
            grid, each = self._grid(job.requests * width)
            residual_kernel[grid](
                *self._rows(), self.maxes, self.sums, *self.kept, *proposal, scales, chosen, residuals,
                self.vocabulary, self.tiles, each, width, TILE=job.tile, **self.constants,
            )  # fmt: skip
        settle_kernel[job.requests,](
            *self._rows(), job.sampling.seeds, job.positions, self.maxes, self.bests, self.sums,
            *self.kept, *proposal, scales, chosen, residuals, written, counts,
            self.vocabulary, self.tiles, self.width,
            TILE=job.tile, WIDTH=triton.next_power_of_2(self.width), **method, **self.constants,
        )  # fmt: skip

    def _read(self, proposal: tuple[Any, ...]) -> None:
        """Launch `stats`, the pass over the logits that every job needs."""
        grid, each = self._grid(self.job.requests * self.width)
        stats_kernel[grid](
            *self._rows(), self.maxes, self.bests, self.sums, self.found, *proposal[2:],
            self.vocabulary, self.tiles, each, self.width, PACKED=self.job.packed, TILE=self.job.tile,
        )  # fmt: skip

    def _filter(self) -> None:
        if not self.job.filtered:
            return
        job, sampling = self.job, self.job.sampling
        room = min(self.room, self.vocabulary)
        values = _new(job, job.logits.shape[0], room, dtype=job.logits.dtype)
        places = _new(job, job.logits.shape[0], room, dtype=torch.int32)
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        constants = {name: self.constants[name] for name in ("PACKED", "TILES")}
        grid, each = self._grid(job.requests * self.width)
        gather_kernel[grid](
            *self._rows(), *filters, self.maxes, self.sums, self.found, values, places,
            self.vocabulary, self.tiles, each, self.width, room, TILE=job.tile, **constants,
        )  # fmt: skip
        cut_kernel[job.requests * self.width,](
            *self._rows(), *filters, self.maxes, self.sums, self.found, values, places, *self.kept,
            self.vocabulary, self.tiles, self.width, room,
            CHUNK=min(_CHUNK, triton.next_power_of_2(self.vocabulary)), num_warps=8, **self.constants,
        )  # fmt: skip

    def _rows(self) -> tuple[Any, ...]:
        job = self.job
        drafts, sampling = job.drafts, job.sampling
        where = drafts.tokens, drafts.row_ends, sampling.slots, sampling.temperature
        return (job.logits, job.logits.stride(0), *where)

    def _proposal(self) -> tuple[Any, ...]:
        probs, logits = self.job.drafts.probs, self.job.drafts.logits
        if logits is None:
            return probs, 0 if probs is None else probs.stride(0), None, 0, 0, None, None
        shape = self.job.logits.shape[0], self.tiles
        steps = logits, logits.stride(0), logits.stride(1)
        return (None, 0, *steps, _new(self.job, *shape), _new(self.job, *shape))

    def _grid(self, rows: int) -> tuple[tuple[int, int], int]:
        """Return a grid of programs that keeps all processors busy, and the tiles of a row per program."""
        splits = max(1, min(self.tiles, _programs(self.job.logits.device) // rows))
        each = triton.cdiv(self.tiles, splits)
        return (rows, triton.cdiv(self.tiles, each)), each


def _new(job: Job, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=job.logits.device)


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_A_PROCESSOR
    return _PROGRAMS_A_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)
