import re
import socket

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
from tests.services.router.http.site import START_S, Site

pytestmark = pytest.mark.timeout(240)

KEY, SECOND, OTHER = "c4nary-one", "c4nary-two", "c4nary-of-vllm"
OPEN = {"/health", "/ping", "/version"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
PREFLIGHT = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


class Door(Site):
    def __init__(self, start, folder):
        keys = folder / "keys"
        keys.write_text(f"# of today\n{KEY}\n\n  # of yesterday\n{SECOND}\n")
        keys.chmod(0o600)
        # The file takes precedence over the variable.
        super().__init__(start, folder, {"VLLM_API_KEY": OTHER}, api_key=f"file:{keys}")

    def status(self, path, headers=None, method="GET"):
        """Return the status of a request. Its target is sent as it is; HTTP clients would normalize it."""
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Length: 0"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        with socket.create_connection(("127.0.0.1", self.port), timeout=START_S) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode())
            return int(client.makefile("rb").readline().split()[1])


@pytest.fixture(scope="module")
def door(start_router, tmp_path_factory):
    return Door(start_router, tmp_path_factory.mktemp("router"))


async def front_end(cluster, model):
    settings = load({"engine": {"model": str(model), "served_model_name": MODEL}})
    config = frontend.build_config(settings)
    args = frontend.build_arguments(settings, config)
    view = ClusterView(cluster.scheduler, 5.0)
    metrics = EngineMetrics(CollectorRegistry())
    llm = frontend.RelayLLM(config, cluster.client, view, settings.engine, metrics)
    return llm, await frontend.build_model_app(llm, args)


async def test_no_variable_opens_vllms_paths_for_developers(cluster, model, monkeypatch):
    """They reset everybody's caches, end others' requests, and show the whole configuration."""
    found = {}
    for developer in (False, True):
        monkeypatch.setattr(envs, "VLLM_SERVER_DEV_MODE", developer)
        llm, app = await front_end(cluster, model)
        found[developer] = {getattr(route, "path", "") for route in app.router.routes}
        llm.shutdown()
    assert sorted(found[True] - found[False]) == []


async def test_every_route_but_three_needs_the_key(cluster, model):
    """Every route of the real app is tried with every method, also those that a later vLLM adds."""
    llm, model_app = await front_end(cluster, model)
    refused = []
    door = Middleware(KeyMiddleware, keys=FixedKeys([KEY]), refused=refused.append)
    metrics = RouterMetrics(CollectorRegistry())
    tenancy = Tenancy(Quotas(None, "r1"), metrics)
    models = [frontend.ModelApp(model_app, [MODEL])]
    app = frontend.opened_to_clients(models, tenancy, Chronicle(metrics), door=door)
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
        got = await http.get("/v1/models", headers=bearer(KEY))
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
def test_no_spelling_of_a_path_gets_around_it(door, target):
    for method in ("GET", "OPTIONS", "HEAD"):
        assert door.status(target, method=method) in (400, 401)


def test_a_body_is_not_read_without_a_key(door):
    url, not_json = f"{door.url}/v1/completions", b"x" * (1 << 20)
    assert httpx.post(url, content=not_json, timeout=START_S).status_code == 401
    got = httpx.post(url, content=not_json, headers=bearer(KEY), timeout=START_S)
    assert got.status_code != 401


@pytest.mark.parametrize(
    "headers",
    [
        *({"Authorization": value} for value in ("", "Bearer", "Bearer ", f"Basic {KEY}", KEY)),
        *map(bearer, (f"{KEY}x", KEY[:-1], KEY.upper(), "#", "# of today", OTHER)),
        {**bearer(KEY), "x-api-key": SECOND},  # two keys, though both are right
    ],
    ids=str,
)
def test_other_keys_are_refused(door, headers):
    assert door.status("/v1/models", headers) == 401


@pytest.mark.parametrize(
    "headers",
    [
        *({"Authorization": value} for value in (f"bearer {KEY}", f"Bearer   {KEY} ")),
        *(bearer(KEY), bearer(SECOND), {"x-api-key": KEY}, {"X-API-Key": f" {KEY}"}),
        {"Authorization": f"BEARER {KEY}", "x-api-key": KEY},
    ],
    ids=str,
)
def test_each_key_opens_in_either_header(door, headers):
    assert [door.status(path, headers) for path in ("/v1/models", "/metrics", "/openapi.json")] == [200] * 3


def test_without_a_key_clients_get_health_and_their_own_exception(door):
    assert [door.status(path) for path in ("/health", "/ping", "/version")] == [503, 503, 200]
    client = openai.OpenAI(base_url=f"{door.url}/v1", api_key="no", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError, match="API key"):
        client.models.list()
    metrics = httpx.get(f"{door.url}/metrics", headers={"x-api-key": KEY}, timeout=START_S).text
    assert 'baton_router_clients_refused_total{reason="401"}' in metrics


def test_no_key_is_on_a_log_line(door):
    assert "c4nary" not in door.process.text
