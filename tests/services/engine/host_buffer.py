"""A UvaBuffer on the CPU: vLLM's own needs pinned memory, and so an accelerator."""

from __future__ import annotations

from typing import Any

import torch


class HostBuffer:
    """Replaces vLLM's class."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, size: int | None = None) -> torch.Tensor:
        return self.cpu[:size]
