"""Checks of this machine alone: limits, a segment of shared memory, ports, the model's files."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import psutil

from baton import addresses, machine, plain_http
from baton.errors import BatonError
from baton.handoff.memory import segments
from baton.handoff.ports import of_worker
from baton.home import expanded
from baton.services import identities
from baton.services.config import Settings
from baton.services.credentials import open_to_all
from baton.services.diagnosis.finding import About, Finding, size
from baton.services.diagnosis.machine import Needs, judge
from baton.services.engine.args import check_model

HERE = "this machine"
_PROBE_BYTES = 1 << 20
# Packages that models need by a mark in their config.json, and why.
_PACKAGES = (
    ("torchvision", b'"vision_config"', "vLLM needs it for a model with a vision tower, even for text alone"),
    ("num2words", b'"smolvlm"', "SmolVLM's processor does not work without it"),
)


def findings(settings: Settings, *, runs: bool) -> Iterator[Finding]:
    """Yield findings. `runs`: a deployment is running, so its workers already have their memory."""
    model = list(_model(settings))
    yield from model
    weights = _weights(settings) if settings.engine.model and not runs else 0
    seen = machine.machine()
    needs, torch = Needs.of_worker(settings, weights), machine.versions().get("torch", "")
    for one in judge(HERE, seen, torch, needs):
        yield one
        if one.area == "shared memory" and needs.uses_shm:
            yield _segment()
    for one in judge(HERE, seen, torch, Needs.of_router()):
        if one.area == "file descriptors":
            yield replace(one, subject="a router here")
    yield from _ports(settings)
    yield from _exposure(settings)
    yield from _proxies()


def _segment() -> Finding:
    """Create a segment as a worker does, which may fail in a sandbox."""
    shm = About("shared memory", HERE)
    try:
        made = segments.create(_PROBE_BYTES)
        made.close()
    except OSError as error:
        return shm.wrong(
            f"a segment cannot be made in {segments.DIRECTORY}: {error.strerror or error}",
            "free some of it, or set handoff.transports to tcp",
        )
    noexec = os.statvfs(segments.DIRECTORY).f_flag & os.ST_NOEXEC
    return shm.ok("a segment can be made" + (" (noexec, which does not matter)" if noexec else ""))


# ---- the model


def _model(settings: Settings) -> Iterator[Finding]:
    named = settings.engine.model
    if not named:
        return
    model = About("model", named)
    try:
        check_model(settings.engine)
    except BatonError as error:
        yield model.wrong(str(error), "set engine.model to a folder that holds a model")
        return
    folder = expanded(named, "engine.model")
    if not folder.is_dir():
        yield model.ok("no such folder: each worker downloads it from Hugging Face by this name")
        return
    unreadable = [path.name for path in sorted(folder.iterdir()) if not os.access(path, os.R_OK)]
    if unreadable:
        what = f"{', '.join(unreadable)}: this user (uid {os.getuid()}) may not read it"
        yield model.wrong(what, "give the workers' user the right to read the folder")
    else:
        yield model.ok(f"readable, weights of {size(_weights(settings))}")
    described = (folder / "config.json").read_bytes()
    for package, mark, why in _PACKAGES:
        if mark in described and importlib.util.find_spec(package) is None:
            yield model.wrong(
                f"{package} is not installed: {why}",
                "run make setup, or install the version in constraints.txt and run deploy/setup/hook",
            )


def _weights(settings: Settings) -> int:
    folder = expanded(settings.engine.model, "engine.model")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0


# ---- ports


def _configured(settings: Settings) -> Iterator[tuple[str, str, int]]:
    yield "router.port", settings.router.host, settings.router.port
    for one in settings.scheduler.address.split(","):
        yield "scheduler.address", *addresses.split(one)
    scheduler = addresses.split(settings.scheduler.address.split(",")[0])[0]
    yield "scheduler.metrics_port", scheduler, settings.scheduler.metrics_port
    worker, port = addresses.split(settings.worker.listen)
    yield "worker.listen", worker, port
    yield "worker.metrics_port", worker, settings.worker.metrics_port
    for port in of_worker(settings.handoff.port, settings.engine.ranks):
        yield "handoff.listen", settings.handoff.host or worker, port


def _ports(settings: Settings) -> Iterator[Finding]:
    for key, host, port in _configured(settings):
        if not port:
            continue
        named, at = About("ports", key), addresses.join(host, port)
        try:
            with addresses.listen(host, port):
                yield named.ok(f"{at} is free")
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                continue  # not an address of this machine
            who, baton = _holder(port)
            what = (
                f"{at} is held by {who}" if who else f"{at} cannot be used: {os.strerror(error.errno or 0)}"
            )
            cure = f"end that process, or choose another port ({key})"
            yield named.ok(what) if baton else named.wrong(what, cure)


def _holder(port: int) -> tuple[str, bool]:
    """Return the process that listens on a port, if this user may see it, and whether it is Baton's.

    Its command line is left out, because it may contain secrets.
    """
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return "", False
    for found in connections:
        if found.status != psutil.CONN_LISTEN or found.laddr[1:] != (port,):
            continue
        if found.pid is None:
            return "a process of another user", False
        try:
            process = psutil.Process(found.pid)
            return f"process {found.pid} ({process.name()})", _is_baton(process.cmdline())
        except psutil.Error:
            return f"process {found.pid}", False
    return "", False


def _is_baton(command: Sequence[str]) -> bool:
    """Return whether a process is Baton's, by title or program: a folder may also be named baton."""
    words = " ".join(command).split()[:3]
    return any(PurePath(word).name == "baton" or word.startswith("baton.") for word in words)


def _proxies() -> Iterator[Finding]:
    if names := plain_http.proxy_variables():
        yield About("proxy", HERE).ok(
            f"{', '.join(names)} set: only used for Hugging Face; Baton's parts connect directly"
        )


def _exposure(settings: Settings) -> Iterator[Finding]:
    try:
        identities.check(settings)
    except BatonError as error:
        yield About("TLS", HERE).wrong(str(error), "turn security.tls on, or set security.insecure")
    if open_to_all(settings.router):
        found = f"{settings.router.host} can be reached from other machines, and no key is needed"
        yield About("keys", "router.host").warning(found, "set router.api_key or router.keys_file")
