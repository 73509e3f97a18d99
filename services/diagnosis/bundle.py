"""The archive for a bug report, without secrets.

Settings in config.SECRET are masked, and their values are also replaced in every text of the archive, because
logs and reports of programs may contain them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

import yaml
from google.protobuf.json_format import MessageToDict

from baton import addresses, machine, plain_http
from baton.errors import BatonError
from baton.protos import scheduler_pb2 as pb
from baton.redis_url import PASSWORD_FILE, without_password
from baton.scheduler.client import SchedulerClient
from baton.scheduler.members import members
from baton.services import credentials
from baton.services.config import ENV_PREFIX, REVEAL, SECRET, Settings
from baton.services.diagnosis.doctor import examine

MOST = 64  # maximum number of the scheduler's processes
MOST_BYTES = 1 << 20  # per answer
TIMEOUT_S = 5.0
AT_ONCE = 16
_NOT_IN_NAMES = re.compile(r"[^\w.-]")


async def gathered(settings: Settings, description: pb.Description | None) -> dict[str, str]:
    """Return each process's metrics, or why they are missing, by its name.

    Scrapes every process that the scheduler lists, and the processes whose ports are set.
    """
    texts, urls = {}, _named(settings)
    told = description or pb.Description()
    for one in members((worker.identity for worker in told.workers), told.processes)[:MOST]:
        name = _NOT_IN_NAMES.sub("_", f"{one.role}-{one.id}")
        if one.reachable:
            urls[name] = f"http://{one.address}/metrics"
        else:
            texts[name] = f"not asked: {one.address!r} cannot be reached from another machine\n"
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(url: str) -> str:
        async with turns:
            return await asyncio.to_thread(_fetched, settings, url)

    return texts | dict(zip(urls, await asyncio.gather(*map(ask, urls.values())), strict=True))


def _named(settings: Settings) -> dict[str, str]:
    found = {"router": f"{settings.router.url}/metrics"}
    ports = {
        "scheduler": (settings.scheduler.address.split(",")[0], settings.scheduler.metrics_port),
        "worker": (settings.worker.listen, settings.worker.metrics_port),
    }
    for name, (listen, port) in ports.items():
        if port:
            host, _ = addresses.split(addresses.from_here(listen))
            found[name] = f"http://{addresses.join(host, port)}/metrics"
    return found


def _fetched(settings: Settings, url: str) -> str:
    request = urllib.request.Request(url)  # noqa: S310 (our own http URL)
    if url.startswith(f"{settings.router.url}/"):
        with contextlib.suppress(BatonError):  # the router answers 401 if only it can read the key file
            for key in credentials.api_keys(settings.router)[:1]:
                request.add_header("Authorization", f"Bearer {key}")
    try:
        with plain_http.get(request, TIMEOUT_S) as answer:
            return str(answer.read(MOST_BYTES).decode(errors="replace"))
    except (OSError, HTTPException) as error:
        return f"not reached: {url}: {error}\n"


HIDDEN = "***"
SHORTEST = 4  # shorter texts are part of too many words to be replaced, and no key is that short
_PLAIN = 8  # texts in engine.extra of at least this length count as secret
_NAMES = re.compile(
    r"key|token|secret|passw|credential|auth|header", re.IGNORECASE
)  # names of variables and keys


def masked(settings: Settings) -> dict[str, Any]:
    """Return the configuration without secrets; engine.extra keeps only its names."""
    tree: dict[str, Any] = settings.model_dump(mode="json")
    for section, key in SECRET:
        value = tree.get(section, {}).get(key)
        if isinstance(value, dict):
            tree[section][key] = dict.fromkeys(value, HIDDEN)
        elif isinstance(value, str) and "://" in value:
            tree[section][key] = without_password(value)
        elif value and value != "memory":
            tree[section][key] = HIDDEN
    return tree


class Hider:
    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for one in secrets if len(one) >= SHORTEST for form in _forms(one)}
        # Longest first, because one secret may be the beginning of another.
        self._pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or r"(?!)")

    @classmethod
    def of(cls, settings: Settings, environment: Mapping[str, str] = os.environ) -> Hider:
        """Return a Hider for the secrets in the settings, in files they name, and in the environment."""
        return cls([*_configured(settings), *_in_files(settings), *_in_environment(environment)])

    def hide(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text)


def _forms(secret: str) -> set[str]:
    return {secret, quote(secret, safe=""), quote(secret), unquote(secret), json.dumps(secret)[1:-1]}


def _configured(settings: Settings) -> Iterator[str]:
    tree: dict[str, Any] = settings.model_dump(mode="json", context=REVEAL)
    for section, key in SECRET:
        value = tree[section][key]
        if (section, key) == ("engine", "extra"):
            yield from _of_mapping(value)
        elif isinstance(value, str) and "://" in value:
            yield from _of_url(value)
        elif isinstance(value, str) and value != "memory" and not value.startswith(credentials.FILE):
            yield value
            yield from value.split(".")  # a token's parts: its id, its secret, the CA's pin


def _of_mapping(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _of_mapping(value)
        elif isinstance(value, str) and (_NAMES.search(name) or len(value) >= _PLAIN):
            yield value


def _of_url(url: str) -> Iterator[str]:
    user, _, place = url.partition("://")[2].rpartition("@")
    yield user.partition(":")[2]
    for option in place.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if _NAMES.search(name) and name != PASSWORD_FILE:
            yield value


def _in_files(settings: Settings) -> Iterator[str]:
    with contextlib.suppress(BatonError):
        yield from credentials.api_keys(settings.router)
    with contextlib.suppress(BatonError):
        yield credentials.page_key(settings.ops)
    with contextlib.suppress(BatonError):
        yield credentials.store_password(settings.scheduler)
    with contextlib.suppress(BatonError):
        yield credentials.keys_store_password(settings.router)
    with contextlib.suppress(BatonError):
        token = credentials.token(settings.security).strip()
        yield from (token, *token.split("."))


def _in_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if _NAMES.search(name) and not value.startswith(("/", credentials.FILE)):  # a path is not a secret
            yield value
            for header in value.split(","):  # OpenTelemetry's, as x-api-key=KEY,authorization=Bearer%20KEY
                text = unquote(header.partition("=")[2])
                yield from (text, text.partition(" ")[2])
        elif "://" in value:
            yield from _of_url(value)


LOG_END = 1 << 20  # bytes of each log
MOST_LOGS = 64  # the newest
ENVIRONMENT_TIMEOUT_S = 120.0  # it imports torch
ENVIRONMENT_MODULE = "vllm.collect_env"
# Variables that affect how a process runs; others may be private.
_SHOWN = (ENV_PREFIX, "VLLM_", "CUDA_", "NCCL_", "OMP_", "TORCH_", "KMP_", "NVIDIA_", "RAY_")


def write(settings: Settings, out: Path, log_dir: str) -> list[str]:
    """Write the archive and return its files' names. Raises OSError, also if `out` is a symbolic link.

    If a part cannot be collected, its file says why.
    """
    hider = Hider.of(settings)
    root = out.name.removesuffix(".gz").removesuffix(".tar")
    names = []
    with _private(out) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in asyncio.run(_all_parts(settings, log_dir)).items():
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


async def _all_parts(settings: Settings, log_dir: str) -> dict[str, str]:
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
    for name, text in (await gathered(settings, description)).items():
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
