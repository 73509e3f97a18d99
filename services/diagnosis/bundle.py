"""The archive for a bug report, without secrets."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import yaml
from google.protobuf.json_format import MessageToDict

from baton import machine
from baton.errors import BatonError
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.services.config import ENV_PREFIX, Settings
from baton.services.diagnosis import metrics
from baton.services.diagnosis.doctor import examine
from baton.services.diagnosis.secrets import Hider, masked

LOG_END = 1 << 20  # bytes of each log
MOST_LOGS = 64  # the newest
ENVIRONMENT_TIMEOUT_S = 120.0  # it imports torch
ENVIRONMENT_MODULE = "vllm.collect_env"
# Variables that affect how a process runs; others may be private.
_SHOWN = (ENV_PREFIX, "VLLM_", "CUDA_", "NCCL_", "OMP_", "TORCH_", "KMP_", "NVIDIA_", "RAY_")


def write(settings: Settings, out: Path, log_dir: str) -> list[str]:
    """Write the archive and return its files' names. Raises OSError, even if `out` is a symbolic link.

    If a part cannot be collected, its file says why.
    """
    hider = Hider.of(settings)
    root = out.name.removesuffix(".gz").removesuffix(".tar")
    names = []
    with _private(out) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in asyncio.run(_gathered(settings, log_dir)).items():
            data = hider.hide(text).encode()
            entry = tarfile.TarInfo(f"{root}/{hider.hide(name)}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
            names.append(name)
    return names


def _private(path: Path) -> BinaryIO:
    """Open a file that only its owner may read, because logs may contain prompts.

    A symbolic link is refused: another user could choose its target.
    """
    file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb")  # noqa: SIM115
    try:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(0)
    except OSError:
        file.close()
        raise
    return file


async def _gathered(settings: Settings, log_dir: str) -> dict[str, str]:
    return {name: text async for name, text in _parts(settings, log_dir)}


async def _parts(settings: Settings, log_dir: str) -> AsyncIterator[tuple[str, str]]:
    yield "versions.json", json.dumps(machine.versions(), indent=2)
    yield "configuration.yaml", yaml.safe_dump(masked(settings), sort_keys=False)
    yield (
        "variables.txt",
        "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)),
    )
    # This also gives the process an operator's identity for the calls below: a token may work only once.
    findings = [one.as_json() async for one in examine(settings)]
    yield "doctor.json", json.dumps(findings, indent=2)
    description, problem = await _described(settings)
    status = MessageToDict(description, preserving_proto_field_name=True) if description else problem
    yield "status.json", json.dumps(status, indent=2)
    for name, text in (await metrics.gathered(settings, description)).items():
        yield f"metrics/{name}.txt", text
    for path in _logs(log_dir):
        yield f"logs/{path.name}", _end(path)
    yield "environment.txt", _environment()


async def _described(settings: Settings) -> tuple[pb.Description | None, str]:
    try:
        async with SchedulerClient(settings.scheduler.address) as client:
            return await client.describe(), ""
    except BatonError as error:
        return None, str(error)


def _logs(log_dir: str) -> list[Path]:
    if not log_dir:
        return []
    logs = [path for path in Path(log_dir).glob("*.log") if path.is_file()]
    found = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)
    return found[:MOST_LOGS]


def _end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_END))
            return file.read(LOG_END).decode(errors="replace")
    except OSError as error:
        return f"not read: {error}\n"


def _environment() -> str:
    """Return what vLLM asks for in bug reports: torch, compilers, CPU, GPUs, packages."""
    command = [sys.executable, "-m", ENVIRONMENT_MODULE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ENVIRONMENT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{ENVIRONMENT_MODULE}: {error}\n"
    return f"{done.stdout}\n{done.stderr}"
