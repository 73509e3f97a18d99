"""`GET /metrics`: this router's metrics. `GET /metrics?all`: those of all processes of the deployment.

`?all` is for a Prometheus that can reach only the router. Samples get the labels `instance` and `role` unless
they have them (as with `honor_labels`). With several processes (router.processes), each returns the metrics
of all, with the label `process`: a number that a restarted process keeps. A sum over the processes would fall
at a restart, and Prometheus would count the other processes twice. A process that does not answer has
`baton_federation_up 0` or `baton_process_up 0`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.metrics import exposition
from baton.scheduler.members import Member
from baton.services.router.http.authentication import METRICS

AT_ONCE = 16  # processes scraped concurrently
ASK_S = 2.0  # timeout for one process
ALL_S = 8.0  # timeout for all processes: Prometheus waits ten seconds
MOST_BYTES = 8 << 20  # the largest answer accepted
UP = "baton_federation_up"
PROCESS_UP = "baton_process_up"
Key = TypeVar("Key")
Parts = list[tuple[Mapping[str, str], bytes | None]]  # labels and metrics of each process; None: no answer
_UP_TEXT = "1 for a process whose metrics are here, 0 for one that did not answer"


@dataclass(frozen=True)
class Processes:
    """All processes of this router; the current process is `number`."""

    number: int
    addresses: Callable[[], Mapping[int, str]]  # number -> host:port of its own metrics


class Federation:
    """Collects the metrics of a deployment; concurrent callers share one answer."""

    def __init__(
        self,
        me: Member,
        registry: CollectorRegistry,
        members: Callable[[], Iterable[Member]],
        processes: Processes | None = None,
    ) -> None:
        """Collect this process's `registry` and the metrics of all other `members`.

        `processes`: the processes of this router, if it has several.
        """
        self._me = me
        self._registry = registry
        self._members = members
        self._processes = processes
        self._running: asyncio.Task[bytes] | None = None

    async def own(self, accept: str) -> tuple[bytes, str]:
        """Return this router's metrics, in a format that the client accepts, and their content type."""
        text, kind = await asyncio.to_thread(exposition, self._registry, accept)
        if self._processes is None:
            return text, kind
        own, addresses = self._processes.number, self._processes.addresses()
        others = {number: address for number, address in addresses.items() if number != own}
        texts: dict[int, bytes | None] = {own: text, **await _ask_all(others, accept)}
        parts: Parts = [({"process": str(number)}, texts[number]) for number in sorted(texts)]
        end = b"# EOF\n" if "openmetrics" in kind else b""
        return await asyncio.to_thread(merged, parts, PROCESS_UP) + end, kind

    async def collect(self) -> bytes:
        """Return all metrics in Prometheus' text format, within ALL_S."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._collect(), name="metrics of all processes")
        return await asyncio.shield(self._running)

    async def _collect(self) -> bytes:
        others = [one for one in self._members() if one.id != self._me.id]
        found = await _ask_all({one: one.address for one in others if one.reachable})
        text, _ = await asyncio.to_thread(exposition, self._registry)
        parts: Parts = [(self._me.labels, text), *((one.labels, found.get(one)) for one in others)]
        return await asyncio.to_thread(merged, parts, UP)


def route(federation: Federation) -> Route:
    """Return the route of /metrics, to be placed before vLLM's own."""

    async def answer(request: Request) -> Response:
        if "all" in request.query_params:
            return Response(await federation.collect(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        text, kind = await federation.own(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": kind})

    return Route(METRICS, answer, methods=["GET"])


def merged(parts: Parts, up: str) -> bytes:
    """Return the metrics of several processes as one text, with a gauge `up` that shows which answered.

    The samples of a family must be adjacent. Each sample gets the labels of its process that it lacks.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    gauge = [f"# HELP {up} {_UP_TEXT}", f"# TYPE {up} gauge"]
    gauge += [f"{up}{{{_written(labels)}}} {int(text is not None)}" for labels, text in parts]
    for labels, text in [*parts, ({}, "\n".join(gauge).encode())]:
        family = ""
        for line in (text or b"").decode(errors="replace").splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(head.startswith(f"# {kind} ") for head in known):
                    known.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_with_labels(line, labels))
    lines = (line for family, found in samples.items() for line in (*heads.get(family, ()), *found))
    return ("\n".join(lines) + "\n").encode()


def _with_labels(line: str, labels: Mapping[str, str]) -> str:
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.partition(" ")
        return f"{name}{{{_written(labels)}}} {value}" if labels else line
    within = f",{rest}"
    lacking = {key: one for key, one in labels.items() if f',{key}="' not in within}
    return f"{name}{{{_written(lacking)},{rest}" if lacking else line


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _escaped(value: str) -> str:  # faster than translate(), which looks up every character
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def _ask_all(addresses: Mapping[Key, str], accept: str = "") -> dict[Key, bytes | None]:
    texts: dict[Key, bytes | None] = dict.fromkeys(addresses)
    turns = asyncio.Semaphore(AT_ONCE)
    limits = aiohttp.ClientTimeout(total=ASK_S)
    headers = {"Accept": accept} if accept else {}
    async with aiohttp.ClientSession(timeout=limits, trust_env=False, headers=headers) as http:

        async def ask(key: Key, address: str) -> None:
            async with turns:
                texts[key] = await _ask(http, address)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALL_S):
                asking = (ask(key, address) for key, address in addresses.items())
                await asyncio.gather(*asking, return_exceptions=True)
    return texts


async def _ask(http: aiohttp.ClientSession, address: str) -> bytes | None:
    try:
        async with http.get(f"http://{address}{METRICS}", allow_redirects=False) as answer:
            if answer.status != 200:
                return None
            text = bytearray()
            async for piece in answer.content.iter_any():
                text += piece
                if len(text) > MOST_BYTES:
                    return None
            return bytes(text)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
