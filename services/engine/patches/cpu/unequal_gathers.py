"""Gather and scatter parts of unequal sizes among CPU ranks.

Data-parallel mixtures of experts need both operations, and the communicator of CPUs has neither.

Leans on: vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator (device_group, world_size,
rank_in_group), and DeviceCommunicatorBase.{all_gatherv, reduce_scatterv}, which it inherits and which raise.
"""

from __future__ import annotations

from math import prod
from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces("vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.all_gatherv")
def _gather(original: Any, self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if dim:
        return original(self, input_, dim, sizes)
    if isinstance(input_, list):
        return _gather_together(self, input_, sizes)
    return _gather_rows(self, input_, sizes)


def _gather_together(self: Any, parts: list[Any], sizes: list[int] | None) -> list[Any]:
    """Gather tensors with equally many rows at once, as bytes: a message costs more than its content."""
    import torch

    def plain(rows: Any) -> Any:
        return rows.clone(memory_format=torch.contiguous_format)

    rows = [plain(part.reshape(len(part), prod(part.shape[1:]))).view(torch.uint8) for part in parts]
    whole = _gather_rows(self, torch.cat(rows, dim=1), sizes)
    columns = whole.split([row.shape[1] for row in rows], dim=1)
    return [
        plain(column).view(part.dtype).reshape(len(whole), *part.shape[1:])
        for column, part in zip(columns, parts, strict=True)
    ]


def _gather_rows(self: Any, part: Any, sizes: list[int] | None) -> Any:
    import torch

    sizes = sizes or [part.shape[0]] * self.world_size
    padded = part.new_zeros((max(sizes), *part.shape[1:]))
    padded[: part.shape[0]] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(parts, sizes, strict=True)])


@replaces("vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.reduce_scatterv")
def _scatter(original: Any, self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    import torch

    if dim not in (0, -input_.dim()):
        return original(self, input_, dim, sizes)
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    whole = input_.clone()
    torch.distributed.all_reduce(whole, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return whole[start : start + sizes[self.rank_in_group]].contiguous()
