"""Judge a machine by what one of its processes sees: shared memory, descriptors, memory, CPU, GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.machine import SHM
from baton.protos import scheduler_pb2 as pb
from baton.services.config import Settings
from baton.services.diagnosis.finding import About, Finding, size
from baton.services.router.http.limits import MAX_CONNECTIONS, OWN_DESCRIPTORS, SPARE_CONNECTIONS

CONTAINER_SHM = 64 << 20  # a container's default
LITTLE_MEMORY = 1 << 30
WORKER_FILES = 1024  # connections of routers and of pulls, the model's files, libraries


@dataclass(frozen=True)
class Needs:
    """The configuration's demands on a machine. Sizes are in bytes; 0 if unknown."""

    shm: int = 0  # one worker's saved KV, all ranks
    uses_shm: bool = True
    files: int = WORKER_FILES
    raises_limit: bool = False  # raises its soft limit of files, as routers do
    memory: int = 0  # memory of one worker that will be started

    @classmethod
    def of_worker(cls, settings: Settings, weights: int) -> Needs:
        """Return the needs of one worker; `weights`: bytes of its model's files."""
        own, engine = settings.handoff, settings.engine
        ranks = engine.local_ranks
        cache = int((engine.kv_cache_gib or 0) * 2**30)
        return cls(
            shm=(own.staging_mib or 0) * 2**20 * ranks,
            uses_shm=(own.transports is None or "shm" in own.transports) and own.enabled is not False,
            memory=weights + cache if weights else 0,
        )

    @classmethod
    def of_router(cls) -> Needs:
        wanted = MAX_CONNECTIONS + SPARE_CONNECTIONS + OWN_DESCRIPTORS
        return cls(uses_shm=False, files=wanted, raises_limit=True)


def judge(subject: str, machine: pb.Machine, torch: str, needs: Needs) -> Iterator[Finding]:
    """Yield findings on a machine. `torch`: the version of PyTorch there, or ""."""
    yield _shm(subject, machine, needs)
    yield _files(subject, machine, needs)
    yield _memory(subject, machine, needs)
    yield from _compute(subject, machine, torch)


def _shm(subject: str, machine: pb.Machine, needs: Needs) -> Finding:
    shm = About("shared memory", subject)
    if not needs.uses_shm:
        return shm.ok("not used: handoff.transports has no shm")
    if not machine.shm_bytes or not machine.shm_writable:
        state = f"there is no {SHM}" if not machine.shm_bytes else f"{SHM} cannot be written"
        return shm.wrong(f"{state}: KV cannot be handed over by shm", "mount a tmpfs at /dev/shm, writable")
    there = f"{SHM} has {size(machine.shm_free)} free of {size(machine.shm_bytes)}"
    more = "shm_size, or an emptyDir of medium Memory"
    if needs.shm > machine.shm_free:
        return shm.wrong(
            f"{there}; handoff.staging_mib asks for {size(needs.shm)}",
            f"make /dev/shm larger (containers: {more}), or lower handoff.staging_mib",
        )
    if machine.shm_bytes <= CONTAINER_SHM:
        return shm.warning(
            f"{there}, a container's default: few prompts can wait to be pulled",
            f"give the container more: {more} at /dev/shm",
        )
    return shm.ok(there)


def _files(subject: str, machine: pb.Machine, needs: Needs) -> Finding:
    files = About("file descriptors", subject)
    limit = machine.files_hard if needs.raises_limit else machine.files_soft
    if limit < needs.files:
        return files.warning(
            f"the limit is {limit}; {needs.files} are needed: further connections will be refused",
            "raise `ulimit -n` (systemd: LimitNOFILE; containers: ulimits)",
        )
    return files.ok(f"the limit is {'none' if limit >= 1 << 62 else limit}, {needs.files} are needed")


def _memory(subject: str, machine: pb.Machine, needs: Needs) -> Finding:
    memory = About("memory", subject)
    there = f"{size(machine.memory_free)} free of {size(machine.memory_bytes)}"
    if needs.memory and not machine.gpus and needs.memory > machine.memory_free:
        return memory.warning(
            f"{there}; weights and KV cache of one worker take {size(needs.memory)}",
            "lower engine.kv_cache_gib, or use a machine with more",
        )
    if machine.memory_free < LITTLE_MEMORY:
        cure = "run fewer workers here, or lower engine.kv_cache_gib"
        return memory.warning(f"{there}: a burst may get a process killed", cure)
    return memory.ok(there)


def _compute(subject: str, machine: pb.Machine, torch: str) -> Iterator[Finding]:
    features, cpu, gpu = list(machine.cpu_features), About("CPU", subject), About("GPU", subject)
    there = f"{machine.cores} cores of {machine.cpu}; {', '.join(features) or 'no AVX2'}"
    if machine.gpus:
        broken = [one for one in machine.gpus if one.startswith("nvidia-smi fails")]
        listed = "; ".join(machine.gpus)
        if broken:
            yield gpu.wrong(listed, "fix the driver: engines find no GPU either")
        elif torch.endswith("+cpu"):
            yield gpu.warning(f"{listed}; torch {torch} uses none", "install baton[gpu] to use them")
        else:
            yield gpu.ok(listed)
    if "amx_tile" in features and not machine.amx_permitted:
        yield cpu.warning(
            f"{there}; the kernel does not let processes use AMX: slower kernels are used",
            "run Linux 5.16 or later, outside a sandbox that refuses arch_prctl",
        )
    elif not machine.gpus and "avx512f" not in features:
        yield cpu.warning(
            f"{there}: without AVX-512, vLLM's kernels for CPUs are slow or missing",
            "use a machine with AVX-512, or a GPU",
        )
    else:
        yield cpu.ok(there)
