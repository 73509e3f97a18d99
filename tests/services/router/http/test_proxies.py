"""Streams through real proxies, set up as docs/proxies.md says, with shorter times."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.protos import scheduler_pb2 as pb
from harness.checkpoints import tiny_qwen2
from harness.fake_worker import MODEL, FakeWorker
from harness.support import eventually, free_port, listening
from tests.services.router.http.test_http import START_S, Site, Starter

PAGE = Path("docs/proxies.md")
PATIENCE_S = 3  # how long each proxy bears a silent stream; a comment comes each second
SILENT_S = 3.6  # how long the worker is silent: the router gives it up after five
CHAT = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
}
ENDS = ("[DONE]", "response.completed", "response.incomplete", "message_stop")


def nginx(text: str, folder: Path) -> list[str]:
    paths = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi"))
    paths += "".join(f"\n{kind}_temp_path {folder}/{kind};" for kind in ("uwsgi", "scgi"))
    around = (
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\nhttp {{ access_log off;\n{paths}\n"
    )
    (folder / "nginx.conf").write_text(f"{around}{text}}}\n")
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def haproxy(text: str, folder: Path) -> list[str]:
    (folder / "haproxy.cfg").write_text(text)
    return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


def envoy(text: str, folder: Path) -> list[str]:
    (folder / "envoy.yaml").write_text(text)
    return ["envoy", "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "-l", "error"]


PROXIES: dict[str, tuple[str, Callable[[str, Path], list[str]]]] = {
    "nginx": ("nginx", nginx),
    "haproxy": ("haproxy", haproxy),
    "envoy": ("yaml", envoy),
}


def page(language: str) -> str:
    """Return the settings in the page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@contextmanager
def proxied(name: str, folder: Path, router_port: int) -> Iterator[str]:
    """Run a proxy in front of a router; yield its URL."""
    language, command = PROXIES[name]
    port = free_port()
    ours = {"8080": str(port), "8000": str(router_port), "60s": f"{PATIENCE_S}s"}
    # In one go: a free port may be 18000.
    text = re.sub("|".join(ours), lambda found: ours[found[0]], page(language))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command(text, folder), stdout=log, stderr=log)
        try:
            eventually(lambda: listening(port), 20, f"{name} listens: {(folder / 'log').read_text()}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    made = Starter()
    yield made
    for process in made.started:
        process.kill()


@pytest.fixture(scope="module")
def site(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Site:
    model = tiny_qwen2(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("router")
    made = Site(starter, model, folder, host="::", frontend={"sse_keep_alive_interval": 1})
    eventually(lambda: listening(made.port), START_S, "the router listens")
    return made


@pytest.fixture
async def workers(site: Site) -> AsyncIterator[list[FakeWorker]]:
    async with site.scheduler() as members:
        roles = (("p", pb.ROLE_PREFILL), ("d", pb.ROLE_DECODE))
        yield [await members.add(FakeWorker(f"{name}.{time.monotonic_ns()}", role)) for name, role in roles]


@pytest.fixture
async def ready(site: Site, workers: list[FakeWorker]) -> list[FakeWorker]:
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient(base_url=site.url, timeout=START_S) as http:
        while (await http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})).status_code != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    return workers


async def stream(url: str, path: str, **more: Any) -> tuple[int, list[tuple[float, str]]]:
    """Return a stream's status, and its pieces with their arrival times."""
    body = {"model": MODEL, "stream": True, **PATHS[path], **more}
    pieces = []
    async with (
        httpx.AsyncClient(timeout=START_S) as http,
        http.stream("POST", f"{url}{path}", json=body) as answer,
    ):
        async for piece in answer.aiter_text():
            pieces.append((time.monotonic(), piece))
        return answer.status_code, pieces


@pytest.mark.parametrize("name", PROXIES)
async def test_silent_streams_are_whole_and_others_come_as_they_are(
    site: Site, ready: list[FakeWorker], tmp_path: Path, name: str
) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    with ExitStack() as stack:
        url = stack.enter_context(proxied(name, tmp_path, site.port))
        for worker in ready:
            worker.wire_s = SILENT_S
        for path, (status, pieces) in zip(
            PATHS, await asyncio.gather(*(stream(url, path) for path in PATHS)), strict=True
        ):
            text = "".join(piece for _, piece in pieces)
            assert status == 200, (path, text)
            assert any(end in text for end in ENDS), (path, text)
            assert ": keep-alive\n\n" in text, path
        for worker in ready:
            worker.wire_s, worker.step_s = 0.0, 0.2
        most = {path: "max_output_tokens" if path == "/v1/responses" else "max_tokens" for path in PATHS}
        for path, (_, pieces) in zip(
            PATHS,
            await asyncio.gather(*(stream(url, path, **{most[path]: 11}) for path in PATHS)),
            strict=True,
        ):
            assert pieces[-1][0] - pieces[0][0] > 0.5, path  # it was not buffered


async def test_every_stream_tells_proxies_what_to_do(site: Site, ready: list[FakeWorker]) -> None:
    for path, body in PATHS.items():
        async with (
            httpx.AsyncClient(base_url=site.url, timeout=START_S) as http,
            http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as answer,
        ):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == (
                "no",
                "no-cache",
            )
            await answer.aread()
            assert ": keep-alive" not in answer.text  # it was never silent


async def test_a_wildcard_of_ipv6_is_of_both_families(site: Site, ready: list[FakeWorker]) -> None:
    for host in ("127.0.0.1", "[::1]"):
        async with httpx.AsyncClient(base_url=f"http://{host}:{site.port}", timeout=START_S) as http:
            assert (await http.get("/health")).status_code == 200
