"""A router process with a fake worker that answers with the test's text, for clients of all APIs.

The model's tokenizer has one token per byte, plus DeepSeek-R1's thinking marks and Hermes' tool-call marks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.service import SchedulerServer
from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import Book
from harness import forked, zygote
from harness.checkpoints import tiny_qwen2
from harness.fake_worker import MODEL, FakeWorker
from harness.router import Members
from harness.scheduling import usual
from harness.support import PATIENCE, free_port

if TYPE_CHECKING:
    import anthropic

START_S = 60.0
MARKS = ("<think>", "</think>")
SCHEDULER: dict[str, Any] = {"placement_lease_s": 2.0, "idle_decode_tokens": 0}


def run(settings: dict[str, Any], environment: dict[str, str]) -> None:
    """Run a router whose view of the workers and of other routers is up to date. Called in a fork."""
    from baton.services.config import router
    from baton.services.router import cluster
    from baton.services.router.vllm import response_store

    cluster.FRESH_S = 0.05
    response_store.START_S = 1.0
    router.WAIT_SHARE = router.REPLACE_SHARE = 1 / 600
    forked.run("router", settings, environment=environment)


def thinking_model(folder: Path) -> Path:
    """Write a tiny model whose tokenizer has thinking marks."""
    from tokenizers import AddedToken, Tokenizer

    tiny_qwen2(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def spelled(*parts: str) -> list[int]:
    """Return the tokens of a text: one per thinking mark and one per other byte."""
    tokens: list[int] = []
    for part in parts:
        if part in MARKS:
            tokens.append(512 + MARKS.index(part))
        else:
            tokens += part.encode()
    return tokens


class ApiSite:
    """A router, a scheduler and one worker. Enter this context in the test's event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        book: Book | None = None,
        environment: dict[str, str] | None = None,
        engine: dict[str, Any] | None = None,
        **router: Any,
    ) -> None:
        """Prepare a site with a model that thinks. `book` has the tenants' keys."""
        self._book = book
        if book is not None:
            router["keys_file"] = str(folder / "keys.yaml")
        self.port, self.scheduler_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._environment = environment or {}
        self.settings: dict[str, Any] = {
            "engine": {
                "model": str(thinking_model(folder / "model")),
                "served_model_name": MODEL,
                **(engine or {}),
            },
            "scheduler": {"address": f"127.0.0.1:{self.scheduler_port}"},
            "router": {"port": self.port, **router},
        }
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ApiSite:
        if (book := self._book) is not None:
            await FileBook(self.settings["router"]["keys_file"]).edit(lambda _: book)
        server = await self._stack.enter_async_context(
            SchedulerServer(usual(**self.settings["scheduler"], **SCHEDULER))
        )
        members = await self._stack.enter_async_context(Members(server.address))
        self.worker = await members.add(FakeWorker("m0", pb.ROLE_MIXED))
        self.process = self.start_router(self.port)
        await self.ready(self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.kill()
        await self._stack.aclose()

    def start_router(self, port: int, **more: Any) -> zygote.Forked:
        folder = self._folder / f"router-{port}"
        folder.mkdir(parents=True)
        settings = {**self.settings, "router": {**self.settings["router"], "port": port, **more}}
        return zygote.shared().start(
            "router", f"{__name__}:run", folder, settings=settings, environment=self._environment
        )

    async def ready(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S * PATIENCE
        async with httpx.AsyncClient(base_url=url) as http:
            while True:
                assert self.process.poll() is None, self.process.text
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/health")).status_code == 200:
                        return
                assert loop.time() < deadline, f"the router is not ready: {self.process.text[-3000:]}"
                await asyncio.sleep(0.05)

    def says(self, *parts: str, per_step: int = 1) -> None:
        """Make the worker answer with `parts`; without any, with letters from a formula."""
        self.worker.script = spelled(*parts)
        self.worker.per_step = per_step

    @contextlib.asynccontextmanager
    async def openai(self, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0) as client:
            yield client

    @contextlib.asynccontextmanager
    async def anthropic(self, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
        import anthropic  # late: routers are forked with this module, and the import takes a second

        async with anthropic.AsyncAnthropic(base_url=self.url, api_key=key, max_retries=0) as client:
            yield client

    def http(self, key: str = "") -> httpx.AsyncClient:
        headers = {"x-api-key": key} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30 * PATIENCE)
