"""Gather and scatter parts of unequal sizes among CPU ranks, for data-parallel mixtures of experts.

Leans on: vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator (device_group, world_size,
rank_in_group), and DeviceCommunicatorBase.{all_gatherv, reduce_scatterv}, which it inherits and which raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    replace(CpuCommunicator, "all_gatherv", gathering, ("self", "input_", "dim", "sizes"))
    replace(CpuCommunicator, "reduce_scatterv", scattering, ("self", "input_", "dim", "sizes"))


def gathering(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that concatenates all ranks' rows: each rank pads its own to the longest part."""

    def one(self: Any, part: Any, sizes: list[int] | None) -> Any:
        import torch

        sizes = sizes or [part.shape[0]] * self.world_size
        padded = part.new_zeros((max(sizes), *part.shape[1:]))
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([rows[:size] for rows, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if dim:
            return shipped(self, input_, dim, sizes)
        if isinstance(input_, list):
            return [one(self, part, sizes) for part in input_]
        return one(self, input_, sizes)

    return all_gatherv


def scattering(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that adds up all ranks' rows and keeps this rank's part of them."""

    def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        import torch

        if dim not in (0, -input_.dim()):
            return shipped(self, input_, dim, sizes)
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        whole = input_.clone()
        torch.distributed.all_reduce(whole, group=self.device_group)
        start = sum(sizes[: self.rank_in_group])
        return whole[start : start + sizes[self.rank_in_group]].contiguous()

    return reduce_scatterv
