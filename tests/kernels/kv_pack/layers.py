"""Random caches with the layouts that engines use."""

from dataclasses import dataclass

import torch

BLOCKS = 11
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Layer:
    """One layer's cache, [BLOCKS, *shape]; the innermost dimension holds whole rows of `width`."""

    shape: tuple[int, ...]
    width: int
    dtype: torch.dtype
    gap: int = 0  # elements between blocks that belong to others

    def make(self, seed, device):
        """Return random rows of very different magnitude; some are zero, tiny or a single number."""
        generator = torch.Generator().manual_seed(seed)
        elements = torch.Size(self.shape).numel()
        if self.dtype in _BYTES:
            numbers = torch.randint(0, 256, (BLOCKS, elements), dtype=torch.uint8, generator=generator)
            return self._spread(numbers.view(self.dtype), device)
        rows = torch.randn(BLOCKS, elements // self.width, self.width, generator=generator)
        rows *= torch.rand(*rows.shape[:2], 1, generator=generator).mul(12).exp2() / 64
        rows[0, 0], rows[1, -1], rows[2, 0] = 0, 2.0**-100, 0
        rows[2, 0, -1] = -3.0
        return self._spread(rows.reshape(BLOCKS, elements).to(self.dtype), device)

    def poisoned(self, device):
        elements = torch.Size(self.shape).numel()
        size = elements * torch.empty(0, dtype=self.dtype).element_size()
        return self._spread(torch.full((BLOCKS, size), 0xA5, dtype=torch.uint8).view(self.dtype), device)

    def _spread(self, blocks, device):
        wide = torch.zeros(BLOCKS, blocks.shape[1] + self.gap, dtype=torch.uint8).to(self.dtype)
        wide[:, : blocks.shape[1]].view(torch.uint8).copy_(blocks.view(torch.uint8))
        return wide.to(device)[:, : blocks.shape[1]]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CACHES = {
    "gqa": [Layer((2, 16, 128), 64, BF16) for _ in range(3)],
    "odd heads, float16": [Layer((5, 16, 2 * 40), 40, FP16)],
    "float32": [Layer((3, 16, 64), 32, FP32)],
    "mla": [Layer((16, 576), 576, BF16), Layer((16, 576), 576, BF16)],
    # Layers with short rows have few tokens: the interpreter takes as long for their tiles as for MLA's.
    "mixed, with gaps": [
        Layer((5, 5, 2 * 24), 24, BF16, gap=40),  # four tiles, the last one shorter
        Layer((16, 576), 576, BF16),
        Layer((16, 656), 1, torch.uint8),
        Layer((1, 16, 2 * 8), 8, FP32, gap=8),
        Layer((2, 4, 32), 16, FP16),
        Layer((2, 16, 32), 32, torch.float8_e4m3fn, gap=24),
    ],
    "one word": [Layer((8,), 8, torch.int8)],
    "more than a tile": [Layer((8, 63, 256), 128, BF16), Layer((1, 63, 576), 1, torch.uint8)],
}


def made(layers, seed, device):
    return [layer.make(seed + i, device) for i, layer in enumerate(layers)]


def same(left, right):
    return all(
        torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )
