"""The router's authentication: with a key set, only the listed paths are open without one."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from vllm import envs

from baton.services.config import load
from baton.services.router.chronicle import Chronicle
from baton.services.router.cluster import ClusterView
from baton.services.router.http.authentication import FixedKeys, KeyMiddleware
from baton.services.router.metrics import RouterMetrics
from baton.services.router.tenancy import Tenancy
from baton.services.router.vllm import frontend
from baton.services.router.vllm.metrics import EngineMetrics
from baton.services.tenants.quotas import Quotas
from harness.fake_worker import MODEL
from harness.router import Cluster
from harness.support import eventually, free_port, listening
from tests.services.router.http.site import START_S, StartRouter

pytestmark = pytest.mark.timeout(240)

KEY, SECOND, STOCK = "c4nary-one", "c4nary-two", "c4nary-of-vllm"
OPEN = {"/health", "/ping", "/version"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
PREFLIGHT = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}


class Door:
    """A router's process and its address, without a scheduler."""

    def __init__(
        self, start: StartRouter, folder: Path, router: dict[str, Any], environment: dict[str, str]
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = start(
            folder,
            environment,
            engine={"served_model_name": MODEL},
            scheduler={"address": f"127.0.0.1:{free_port()}"},
            router={"port": self.port, **router},
        )

    def status(self, path: str, key: str = "", method: str = "GET", **headers: str) -> int:
        """Return the status of a request. Its target is sent as it is; HTTP clients would normalize it."""
        if key:
            headers["Authorization"] = f"Bearer {key}"
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Length: 0"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with socket.create_connection(("127.0.0.1", self.port), timeout=START_S) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode())
            return int(client.makefile("rb").readline().split()[1])


@pytest.fixture(scope="module")
def doors(start_router: StartRouter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Door]:
    folder = tmp_path_factory.mktemp("routers")
    keys = folder / "keys"
    keys.write_text(f"# of today\n{KEY}\n\n  # of yesterday\n{SECOND}\n")
    keys.chmod(0o600)
    stock = {"VLLM_API_KEY": STOCK}
    made = {
        "key": Door(start_router, folder / "key", {"api_key": KEY}, {}),
        "file": Door(start_router, folder / "file", {"api_key_file": str(keys)}, stock),
        "stock": Door(start_router, folder / "stock", {}, stock),
        "none": Door(start_router, folder / "none", {}, {}),
    }
    for name, door in made.items():
        eventually(lambda door=door: listening(door.port), START_S, f"router {name!r} listens")
    return made


async def front_end(cluster: Cluster, model: Path) -> tuple[Any, Any]:
    """Return vLLM's front end over a cluster, and its app."""
    settings = load({"engine": {"model": str(model), "served_model_name": MODEL}})
    config = frontend.build_config(settings)
    args = frontend.build_arguments(settings, config)
    view = ClusterView(cluster.scheduler, 5.0)
    metrics = EngineMetrics(CollectorRegistry())
    llm = frontend.RelayLLM(config, cluster.client, view, settings.engine, metrics)
    return llm, await frontend.build_model_app(llm, args)


async def test_no_variable_opens_vllms_paths_for_developers(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reset everybody's caches, end others' requests, and show the whole configuration."""
    found = {}
    for developer in (False, True):
        monkeypatch.setattr(envs, "VLLM_SERVER_DEV_MODE", developer)
        llm, app = await front_end(cluster, model)
        found[developer] = {getattr(route, "path", "") for route in app.router.routes}
        llm.shutdown()
    assert sorted(found[True] - found[False]) == []


async def test_every_route_but_three_needs_the_key(cluster: Cluster, model: Path) -> None:
    """Every route of the real app is tried with every method, also those that a later vLLM adds."""
    llm, model_app = await front_end(cluster, model)
    refused: list[str] = []
    door = Middleware(KeyMiddleware, keys=FixedKeys([KEY]), refused=refused.append)
    tenancy = Tenancy(Quotas(None, "r1"), RouterMetrics(CollectorRegistry()))
    models = [frontend.ModelApp(model_app, [MODEL])]
    app = frontend.opened_to_clients(models, tenancy, Chronicle(), door=door)
    paths = {re.sub(r"\{[^}]*\}", "x", route.path) for route in app.router.routes}
    assert paths >= {*OPEN, "/metrics", "/invocations", "/tokenize", "/docs", "/v1/models"}
    found = set()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        for path in sorted(paths):
            for method in METHODS:
                got = await http.request(method, path)
                if got.status_code != 401:
                    found.add(path)
                    continue
                assert got.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":  # no body in the answer
                    error = {"type": "UnauthorizedError", "param": None, "code": 401}
                    if path.startswith("/v1/messages"):
                        error = {"type": "authentication_error"}  # Anthropic's form
                    assert got.json()["error"].items() >= error.items()
        assert found == OPEN
        assert set(refused) == {"401"}
        # A preflight is answered before the middleware (vLLM allows no other origin). Any other OPTIONS
        # request would reach mounted apps.
        assert "Disallowed CORS origin" in (await http.options("/metrics", headers=PREFLIGHT)).text
        assert (await http.options("/metrics")).status_code == 401
        got = await http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        assert got.json()["data"][0]["id"] == MODEL
    llm.shutdown()


@pytest.mark.parametrize(
    "target",
    [
        *("/v1/models", "/v1/models/", "//v1/models", "/V1/models", "/%761/models", "/v1%2fmodels", "/v1"),
        *("/./v1/models", "/health/../v1/models", "/health%2f..%2fv1/models", "/health/", "//health"),
        *("/health/v1/models", "/health;/v1/models", "/Health", "/pingx", "/version/", "/health%00", "*"),
        *("/metrics", "/metrics/", "/metricsx", "//metrics", "/metrics/../health", "/%6detrics"),
        *("http://router/v1/models", "/docs", "/redoc", "/openapi.json", "/load", "/nowhere", "/static/x"),
        *("/v1/models?x=/health", "/v1/models#/health", "/?/health", "?/health"),
    ],
)
def test_no_spelling_of_a_path_gets_around_it(doors: dict[str, Door], target: str) -> None:
    for method in ("GET", "OPTIONS", "HEAD"):
        assert doors["key"].status(target, method=method) in (400, 401)


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/generative_scoring", "/v1/completions"])
def test_no_work_is_done_without_a_key(doors: dict[str, Door], path: str) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    url = doors["key"].url + path
    assert httpx.post(url, json=body, timeout=START_S).status_code == 401
    assert httpx.post(url, content=b"x" * (1 << 20), timeout=START_S).status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(url, json=body, headers=headers, timeout=START_S).status_code != 401


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY.upper()}",
    ],
)
def test_other_keys_are_refused(doors: dict[str, Door], value: str) -> None:
    assert doors["key"].status("/v1/models", Authorization=value) == 401


def test_the_key_opens(doors: dict[str, Door]) -> None:
    for value in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer   {KEY} "):
        assert doors["key"].status("/v1/models", Authorization=value) == 200
    assert doors["key"].status("/metrics", KEY) == 200
    assert doors["key"].status("/openapi.json", KEY) == 200
    assert [doors["key"].status(path) for path in ("/health", "/ping", "/version")] == [503, 503, 200]
    with (
        openai.OpenAI(base_url=f"{doors['key'].url}/v1", api_key="no", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.models.list()
    refused = httpx.get(
        f"{doors['key'].url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=START_S
    )
    assert 'baton_router_clients_refused_total{reason="401"}' in refused.text


def test_every_key_of_a_file_opens(doors: dict[str, Door]) -> None:
    door = doors["file"]
    assert [door.status("/v1/models", key) for key in (KEY, SECOND)] == [200, 200]
    assert [door.status("/v1/models", key) for key in ("", "#", "# of today", STOCK)] == [401] * 4


def test_vllms_own_variable_is_honoured(doors: dict[str, Door]) -> None:
    door = doors["stock"]
    assert [door.status("/v1/models", key) for key in ("", KEY, STOCK)] == [401, 401, 200]
    assert [door.status("/invocations", key, "POST") for key in ("", KEY)] == [401, 401]


def test_without_any_key_all_is_open(doors: dict[str, Door]) -> None:
    door = doors["none"]
    assert [door.status(path) for path in ("/v1/models", "/metrics", "/docs", "/version")] == [200] * 4


def test_no_key_is_on_a_log_line(doors: dict[str, Door]) -> None:
    for door in doors.values():
        assert not re.search("c4nary", door.process.text)
