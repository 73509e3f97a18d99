"""Streams through real proxies, configured as in docs/proxies.md but with shorter timeouts."""

import asyncio
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from baton.protos.worker_pb2 import PHASE_PREFILL
from harness.fake_worker import MODEL, Fault, until
from harness.support import eventually, free_port, listening
from tests.services.router.http.site import START_S, Site, pair

PAGE = Path("docs/proxies.md")
PATIENCE_S = 3  # the proxies' timeout of a silent stream; a comment comes each second
SILENT_S = 3.6  # how long each stream is silent
CHAT = [{"role": "user", "content": "Hi"}]
# A body for each path, and its name for the length of the answer.
PATHS = {
    "/v1/chat/completions": ({"messages": CHAT}, "max_tokens"),
    "/v1/completions": ({"prompt": "Hi"}, "max_tokens"),
    "/v1/responses": ({"input": "Hi"}, "max_output_tokens"),
    "/v1/messages": ({"messages": CHAT}, "max_tokens"),
}
ENDS = ("[DONE]", "response.completed", "response.incomplete", "message_stop")


def nginx(text, folder):
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    around = f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\nhttp {{ access_log off; {paths}\n"
    (folder / "nginx.conf").write_text(f"{around}{text}}}\n")
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def haproxy(text, folder):
    (folder / "haproxy.cfg").write_text(text)
    return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


def envoy(text, folder):
    (folder / "envoy.yaml").write_text(text)
    return ["envoy", "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "-l", "error"]


PROXIES = {"nginx": ("nginx", nginx), "haproxy": ("haproxy", haproxy), "envoy": ("yaml", envoy)}


def page(language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


@contextmanager
def proxied(name, folder, router_port):
    language, command = PROXIES[name]
    port = free_port()
    ours = {"8080": str(port), "8000": str(router_port), "60s": f"{PATIENCE_S}s"}
    # All at once, because the free port may contain 8000.
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
def site(start_router, tmp_path_factory):
    frontend = {"sse_keep_alive_interval": 1}
    return Site(start_router, tmp_path_factory.mktemp("router"), host="::", frontend=frontend)


@pytest.fixture
async def workers(members, http):
    return await pair(members, http, step_s=0.0)


async def stream(url, path, tokens):
    """Return a stream's headers and text, and the time between its first and last piece."""
    fields, length = PATHS[path]
    body = {"model": MODEL, "stream": True, **fields, length: tokens}
    pieces = []
    async with (
        httpx.AsyncClient(timeout=START_S) as http,
        http.stream("POST", f"{url}{path}", json=body) as answer,
    ):
        async for piece in answer.aiter_text():
            pieces.append((time.monotonic(), piece))
        text = "".join(piece for _, piece in pieces)
        assert answer.status_code == 200, (path, text)
        return answer.headers, text, pieces[-1][0] - pieces[0][0]


@pytest.mark.parametrize("name", PROXIES)
async def test_proxies_neither_cut_nor_buffer_streams(site, workers, tmp_path, name):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    with proxied(name, tmp_path, site.port) as url:
        prefill, decode = workers
        prefill.faults += [Fault(PHASE_PREFILL, silent=True)] * len(PATHS)
        asking = asyncio.gather(*(stream(url, path, 2) for path in PATHS))
        await until(lambda: len(prefill.running) == len(PATHS), "all wait for their first token")
        await asyncio.sleep(SILENT_S)
        prefill.go_on()
        for _, text, _ in await asking:
            assert any(end in text for end in ENDS), text
            assert ": keep-alive\n\n" in text
        decode.step_s = 0.2
        for _, text, took_s in await asyncio.gather(*(stream(url, path, 11) for path in PATHS)):
            assert took_s > 0.5, text  # it was not buffered


async def test_streams_have_headers_for_proxies(site, workers):
    for path in PATHS:
        headers, text, _ = await stream(site.url, path, 2)
        assert headers["content-type"].startswith("text/event-stream"), path
        assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache"), path
        assert ": keep-alive" not in text, path  # it was never silent


async def test_the_ipv6_wildcard_also_serves_ipv4(site, workers):
    for host in ("127.0.0.1", "[::1]"):
        async with httpx.AsyncClient(base_url=f"http://{host}:{site.port}", timeout=START_S) as http:
            assert (await http.get("/health")).status_code == 200
