"""OpenAI's and Anthropic's own clients at one router: keys, refusals, classes, models, errors in streams."""

import asyncio
import json

import openai
import pytest
import pytest_asyncio

from baton.protos.worker_pb2 import PHASE_DECODE
from baton.services.tenants.model import Book, Tenant
from harness.api_site import ApiSite
from harness.fake_worker import MODEL, Fault
from tests.services.router.http.site import api_key

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

KEY, SLOW, BUSY = "c4nary-key", "c4nary-slow", "c4nary-busy"
ASKED = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
ALIASES = ["tiny-too", "some/tiny"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory):
    book = Book(
        tenants={"slow": Tenant(requests_per_s=1), "busy": Tenant(classes=["interactive"])},
        keys={"key": api_key(KEY, "plain"), "slow": api_key(SLOW, "slow"), "busy": api_key(BUSY, "busy")},
    )
    parsers = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
    engine = {**parsers, "served_model_aliases": ALIASES}
    async with ApiSite(tmp_path_factory.mktemp("apis"), book=book, engine=engine) as made:
        yield made


@pytest.fixture(autouse=True)
def plain(site):
    site.says()


def form_of(answer):
    """Return which API's form an error has, and its type."""
    body = answer.json()
    if body.get("type") == "error":
        assert set(body["error"]) == {"type", "message"}
        return "anthropic", body["error"]["type"]
    return "openai", body["error"]["type"]


KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/x.png"}}
# Headers and fields of each request, and the status of its refusal.
REFUSALS = {
    "no key": ({"x-api-key": ""}, {}, 401),
    "a wrong key": ({"x-api-key": "c4nary-nobody"}, {}, 401),
    "two keys": ({"Authorization": f"Bearer {BUSY}"}, {}, 401),
    "a class that the key may not use": ({"x-api-key": BUSY, "X-Baton-Class": "batch"}, {}, 403),
    "an unknown model": ({}, {"model": "nobody"}, 404),
    "a wrong type": ({}, {"max_tokens": "many"}, 400),
    "no JSON": ({}, {"": "broken"}, 400),
    "a prompt that is too long": ({}, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400),
    "a body that is too large": ({}, {"metadata": {"user_id": "x" * (9 << 20)}}, 413),
    "a wrong deadline": ({"X-Request-Timeout": "soon"}, {}, 400),
    "an image": ({}, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_refusal_has_its_apis_form(site, refusal, stream):
    headers, fields, status = refusal
    headers = {"x-api-key": KEY, "Content-Type": "application/json", **headers}
    body = b'{"model": ' if "" in fields else json.dumps({**ASKED, **fields, "stream": stream}).encode()
    before = len(site.process.text.splitlines())
    async with site.http() as http:
        for path in (MESSAGES, CHAT):
            got = await http.post(path, content=body, headers=headers)
            assert got.status_code == status, got.text
            form, kind = form_of(got)
            assert (form, kind) == ("anthropic", KINDS[status]) if path == MESSAGES else form == "openai"
            assert got.headers["content-type"] == "application/json"
    logged = site.process.text.splitlines()[before:]
    assert len(logged) <= 4, logged


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", COUNT, 400, "invalid_request_error"),
    ],
)
async def test_anthropics_other_paths_have_its_form_too(site, method, path, status, kind):
    async with site.http(KEY) as http:
        got = await http.request(method, path, json={})
    assert (got.status_code, form_of(got)) == (status, ("anthropic", kind))


async def test_the_clients_raise_their_own_exceptions(site):
    import anthropic

    async with site.anthropic("c4nary-nobody") as client:
        with pytest.raises(anthropic.AuthenticationError, match="a valid API key is needed"):
            await client.messages.create(**ASKED)
    async with site.anthropic(KEY) as client:
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            await client.messages.create(**{**ASKED, "model": "nobody"})
    async with site.anthropic(SLOW) as client:
        asked = [client.messages.create(**ASKED) for _ in range(20)]
        with pytest.raises(anthropic.RateLimitError) as caught:
            await asyncio.gather(*asked)
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    assert float(caught.value.response.headers["retry-after"]) >= 1


async def test_a_failing_stream_ends_in_its_apis_form(site):
    """The worker falls silent after some tokens, so each stream has begun."""
    fault = Fault(PHASE_DECODE, after_tokens=2, silent=True)

    async def cut(path, **more):
        site.worker.faults.append(fault)
        body = {**ASKED, "stream": True, **more}
        async with site.http(KEY) as http:
            got = await http.post(path, json=body, headers={"X-Request-Timeout": "2"})
        site.worker.faults.clear()
        assert got.status_code == 200, got.text
        return [line for line in got.text.splitlines() if line]

    lines = await cut(CHAT)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == 504
    lines = await cut(MESSAGES)
    assert lines[-2] == "event: error"
    error = json.loads(lines[-1].removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")
    assert "the request took longer than" in error["error"]["message"]
    lines = await cut(RESPONSES, input="Hi")
    assert lines[-2] == "event: response.failed"
    failed = json.loads(lines[-1].removeprefix("data: "))
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert "Traceback" not in site.process.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_is_504_on_each_api(site, path, stream):
    site.worker.faults.append(Fault(PHASE_DECODE, silent=True))
    body = {**ASKED, "input": "Hi", "stream": stream}
    async with site.http(KEY) as http:
        got = await http.post(path, json=body, headers={"X-Request-Timeout": "0.3"})
    site.worker.faults.clear()
    assert got.status_code == 504, got.text
    if path == MESSAGES:
        assert form_of(got) == ("anthropic", "timeout_error")
    else:
        assert form_of(got)[0] == "openai"


async def test_anthropics_tiers_leave_the_class_to_the_key(site):
    async with site.anthropic(KEY) as client:
        for tier in ("auto", "standard_only"):
            got = await client.messages.create(**ASKED, service_tier=tier)
            assert got.stop_reason == "max_tokens"
    async with site.http(KEY) as http:
        assert (await http.post(MESSAGES, json={**ASKED, "service_tier": "gold"})).status_code == 400


async def test_the_fields_of_anthropics_clients_are_accepted(site):
    """The API's documented fields, and fields that coding agents send."""
    tool = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    async with site.anthropic(KEY) as client:
        got = await client.messages.create(
            **ASKED,
            system=[cached],
            metadata={"user_id": "u"},
            stop_sequences=["zzz"],
            thinking={"type": "disabled"},
            tools=[{**tool, "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            extra_headers={"anthropic-beta": "prompt-caching-2024-07-31"},
            extra_query={"beta": "true"},
            extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9, "context_management": {"edits": []}},
        )
        assert got.role == "assistant"
        assert got.usage.output_tokens == 8
        counted = await client.messages.count_tokens(model=MODEL, messages=ASKED["messages"], system=[cached])
        assert counted.input_tokens > 0


async def test_models_are_listed_and_retrieved_in_both_forms(site):
    import anthropic

    async with site.openai(KEY) as client:
        listed, *others = (await client.models.list()).data
        assert [one.id for one in others] == ALIASES
        found = await client.models.retrieve(MODEL)
        assert found.id == MODEL == listed.id
        assert found.object == "model"
        assert found.model_extra == {**listed.model_extra, "permission": found.model_extra["permission"]}
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nobody")
        assert caught.value.code == "model_not_found"
        assert MODEL not in str(caught.value)
    async with site.anthropic(KEY) as other:
        page = await other.models.list()
        assert [one.id for one in page.data] == [MODEL, *ALIASES]
        info = await other.models.retrieve(MODEL)
        assert (info.type, info.display_name) == ("model", MODEL)
        assert info.max_input_tokens == found.model_extra["max_model_len"]
        with pytest.raises(anthropic.NotFoundError) as missed:
            await other.models.retrieve("nobody")
        assert missed.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("name", ALIASES)
async def test_a_model_has_several_names(site, name):
    async with site.openai(KEY) as client:
        assert (await client.models.retrieve(name)).id == name
        answer = await client.chat.completions.create(**{**ASKED, "model": name})
        assert answer.model == MODEL
    async with site.anthropic(KEY) as other:
        assert (await other.models.retrieve(name)).id == name
        assert (await other.messages.create(**{**ASKED, "model": name})).stop_reason == "max_tokens"
