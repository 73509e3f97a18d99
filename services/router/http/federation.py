"""`GET /metrics?all`: the metrics of all processes of the deployment in one answer.

For a Prometheus that knows the router's address alone. Each process is asked at the address that it gave to
the scheduler; its samples get the labels `instance` and `role`, unless they have one of that name already (as
`honor_labels` does). One that does not answer in time is a sample `baton_federation_up 0`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import aiohttp
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.metrics import exposition
from baton.scheduler.members import Member
from baton.services.router.http.authentication import METRICS

AT_ONCE = 16  # processes asked side by side
ASK_S = 2.0  # for one to answer
ALL_S = 8.0  # for all: Prometheus waits ten seconds
MOST_BYTES = 8 << 20  # of one answer
UP = "baton_federation_up"
_UP_TEXT = "1 for a process whose metrics are here, 0 for one that did not answer"


class Federation:
    """Collects the metrics of a deployment; callers at the same time share one answer."""

    def __init__(
        self, me: Member, registry: CollectorRegistry, members: Callable[[], Iterable[Member]]
    ) -> None:
        """Collect `registry`, which is this router's own, and the metrics of all other `members`."""
        self._me = me
        self._registry = registry
        self._members = members
        self._running: asyncio.Task[bytes] | None = None

    def own(self, accept: str) -> tuple[bytes, str]:
        """Return this router's own metrics, and their content type."""
        return exposition(self._registry, accept)

    async def collect(self) -> bytes:
        """Return all metrics in Prometheus' text format, within ALL_S."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._collect(), name="metrics of all processes")
        return await asyncio.shield(self._running)

    async def _collect(self) -> bytes:
        others = [one for one in self._members() if one.id != self._me.id]
        texts: dict[Member, bytes | None] = dict.fromkeys(others)
        turns = asyncio.Semaphore(AT_ONCE)
        limits = aiohttp.ClientTimeout(total=ASK_S)
        async with aiohttp.ClientSession(timeout=limits, trust_env=False) as http:

            async def ask(one: Member) -> None:
                async with turns:
                    texts[one] = await _ask(http, one)

            asking = [asyncio.create_task(ask(one)) for one in others if one.reachable]
            if asking:
                _, late = await asyncio.wait(asking, timeout=ALL_S)
                for task in late:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
        return await asyncio.to_thread(self._merged, texts)

    def _merged(self, texts: Mapping[Member, bytes | None]) -> bytes:
        families = Families()
        families.add(exposition(self._registry)[0].decode(), self._me.labels)
        up = {self._me: 1, **{one: int(text is not None) for one, text in texts.items()}}
        for one, text in texts.items():
            if text is not None:
                families.add(text.decode(errors="replace"), one.labels)
        lines = [f"{UP}{{{_written(one.labels)}}} {value}" for one, value in up.items()]
        families.add("\n".join([f"# HELP {UP} {_UP_TEXT}", f"# TYPE {UP} gauge", *lines]), {})
        return families.text().encode()


def route(federation: Federation) -> Route:
    """Return the route of /metrics, with the query `all` of all processes. It goes before vLLM's own."""

    async def answer(request: Request) -> Response:
        if "all" in request.query_params:
            return Response(await federation.collect(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        text, kind = await asyncio.to_thread(federation.own, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": kind})

    return Route(METRICS, answer, methods=["GET"])


class Families:
    """Texts of several processes put together: the samples of a family must stand side by side."""

    def __init__(self) -> None:
        self._heads: dict[str, list[str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, text: str, labels: Mapping[str, str]) -> None:
        """Add one process's text; each sample gets those of the labels that it lacks."""
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                heads = self._heads.setdefault(family, [])
                if not any(head.startswith(f"# {kind} ") for head in heads):
                    heads.append(line)
            elif line and not line.startswith("#"):
                self._samples.setdefault(family, []).append(_with_labels(line, labels))

    def text(self) -> str:
        """Return the whole in Prometheus' text format."""
        found = (line for family in self._samples for line in self._of(family))
        return "\n".join(found) + "\n"

    def _of(self, family: str) -> list[str]:
        return [*self._heads.get(family, []), *self._samples[family]]


def _with_labels(line: str, labels: Mapping[str, str]) -> str:
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.partition(" ")
        return f"{name}{{{_written(labels)}}} {value}" if labels else line
    lacking = {key: one for key, one in labels.items() if not _has(rest, key)}
    return f"{name}{{{_written(lacking)},{rest}" if lacking else line


def _has(rest: str, key: str) -> bool:
    return rest.startswith(f'{key}="') or f',{key}="' in rest


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def _ask(http: aiohttp.ClientSession, one: Member) -> bytes | None:
    """Return a process's metrics; None where it does not give them."""
    try:
        async with http.get(f"http://{one.address}{METRICS}", allow_redirects=False) as answer:
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
