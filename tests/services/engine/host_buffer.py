"""A UvaBuffer on the CPU: vLLM's own needs pinned memory, and so an accelerator."""

import torch


class HostBuffer:
    """Replaces vLLM's class."""

    def __init__(self, size, dtype):
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, size=None):
        return self.cpu[:size]
