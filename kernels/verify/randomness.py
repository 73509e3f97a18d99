"""Random numbers as a function of (seed, position, number of the row): Philox 4x32-10 (Salmon et al., 2011).

One evaluation gives what a row needs: a number for accepting its draft, one for a tile of the vocabulary, one
for a token of the tile. The row's number in its request is part of the counter: a position is verified again
in the next step when drafts before it were rejected, and block verification has by then learnt something
about the numbers drawn for it (that they were too large), so that the same must not be drawn again.
"""

from __future__ import annotations

import torch

DOMAIN = 0x42A70E  # of the counter's fourth word: these numbers are no other Philox user's
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[..., 3] float32 in (0, 1), multiples of 2**-24, from three int64 tensors of shape [...]."""
    counter = [
        positions & _WORD,
        (positions >> 32) & _WORD,
        numbers & _WORD,
        torch.full_like(numbers, DOMAIN),
    ]
    keys = [seeds & _WORD, (seeds >> 32) & _WORD]
    for _ in range(10):
        high0, low0 = _product(counter[0], _MULTIPLIERS[0])
        high1, low1 = _product(counter[2], _MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ keys[0], low1, high0 ^ counter[3] ^ keys[1], low0]
        keys = [(key + more) & _WORD for key, more in zip(keys, _KEYS, strict=True)]
    words = torch.stack(counter[:3], -1)
    return ((words >> 9).float() + 0.5) * 2.0**-23


def _product(one: torch.Tensor, other: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of the product of two words; int64 would not hold it in one piece."""
    low = (one & 0xFFFF) * other
    high = (one >> 16) * other + (low >> 16)
    return (high >> 16) & _WORD, ((high << 16) | (low & 0xFFFF)) & _WORD
