"""Draw random numbers as a function of seed, position and row number: Philox 4x32-10 (Salmon et al., 2011).

One evaluation gives a row's three numbers: for accepting its draft, for a tile of the vocabulary, and for a
token of the tile. The row's number in its request is part of the counter, because a position is verified
again in the next step if a draft before it was rejected. Block verification has by then conditioned on the
numbers drawn for that position (they were too large), so they must not be drawn again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

DOMAIN = 0x42A70E  # the counter's fourth word, which keeps these numbers apart from other uses of Philox
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEYS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_WORD, _BITS = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = npt.NDArray[np.uint64]  # 32 bits each


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw float32 [..., 3] in (0, 1), multiples of 2**-24, from three int64 tensors [...] on the CPU."""
    seed, position, number = (one.numpy().view(np.uint64) for one in (seeds, positions, numbers))
    counter = [position & _WORD, position >> _BITS, number & _WORD, np.full_like(number, DOMAIN)]
    keys = [seed & _WORD, seed >> _BITS]
    for _ in range(10):
        high0, low0 = _product(counter[0], _MULTIPLIERS[0])
        high1, low1 = _product(counter[2], _MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ keys[0], low1, high0 ^ counter[3] ^ keys[1], low0]
        keys = [(key + more) & _WORD for key, more in zip(keys, _KEYS, strict=True)]
    words = np.stack(counter[:3], -1) >> np.uint64(9)
    return torch.from_numpy((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23))


def _product(one: Words, other: np.uint64) -> tuple[Words, Words]:
    product = one * other
    return product >> _BITS, product & _WORD
