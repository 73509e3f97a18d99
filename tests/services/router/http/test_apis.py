"""OpenAI's and Anthropic's own clients at one router: keys, refusals, classes, models, errors in streams."""

import asyncio
import json

import openai
import pytest
import pytest_asyncio

from baton.protos.worker_pb2 import PHASE_DECODE
from baton.services.tenants.model import Book, Tenant
from harness.api_site import ApiSite
from harness.fake_worker import MODEL, Fault, until
from tests.services.router.http.site import api_key
from tests.services.router.http.site import events as parsed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

KEY, SLOW, BUSY = "c4nary-key", "c4nary-slow", "c4nary-busy"
ASKED = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
ALIASES = ["tiny-too", "some/tiny"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory):
    tenants = {"slow": Tenant(requests_per_s=1), "busy": Tenant(classes=["interactive"])}
    keys = {"key": api_key(KEY, "plain"), "slow": api_key(SLOW, "slow"), "busy": api_key(BUSY, "busy")}
    parsers = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
    engine = {**parsers, "served_model_name": [MODEL, *ALIASES]}
    folder, book = tmp_path_factory.mktemp("apis"), Book(tenants=tenants, keys=keys)
    async with ApiSite(folder, book=book, engine=engine) as made:
        yield made


@pytest.fixture(autouse=True)
def plain(site):
    site.says()


def form_of(answer):
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

    async def cut(path, **more):
        body = {**ASKED, "stream": True, **more}
        async with site.http(KEY) as http:
            got = await http.post(path, json=body, headers={"X-Request-Timeout": "4"})
        assert got.status_code == 200, got.text
        return [line for line in got.text.splitlines() if line]

    site.worker.faults += [Fault(PHASE_DECODE, after_tokens=2, silent=True)] * 3
    chat, messages, responses = await asyncio.gather(cut(CHAT), cut(MESSAGES), cut(RESPONSES, input="Hi"))
    assert not site.worker.faults
    await until(lambda: not site.worker.running, "the worker drops the requests")
    *_, tokens, error, done = chat
    assert json.loads(tokens[6:])["choices"][0]["delta"]["reasoning"]
    assert json.loads(error[6:])["error"]["code"] == 504
    assert done == "data: [DONE]"
    assert messages[-2] == "event: error"
    error = json.loads(messages[-1].removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")
    assert "the request took longer than" in error["error"]["message"]
    assert responses[-2] == "event: response.failed"
    failed = json.loads(responses[-1].removeprefix("data: "))
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
    anthropics, openais = ("anthropic", "timeout_error"), ("openai", "GatewayTimeoutError")
    assert form_of(got) == (anthropics if path == MESSAGES else openais)


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
        assert (got.role, got.usage.output_tokens) == ("assistant", 8)
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


# -- how answers end: cut or stopped, with thoughts and tool calls, streamed or whole

THOUGHT, SAID = "Let me see. ", "It is Paris, of course."
WHERE = {"model": MODEL, "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 200}
RESPONSE = {"model": MODEL, "input": "Where?"}
TOOL = {"name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "Paris"}}\n</tool_call>'


async def whole(site, path, body):
    async with site.http(KEY) as http:
        got = await http.post(path, json=body)
    assert got.status_code == 200, got.text
    return got if body.get("stream") else got.json()


async def events(site, path, body):
    return await parsed(await whole(site, path, {**body, "stream": True}))


@pytest.mark.parametrize("per_step", [1, 3, 16, 200])
async def test_streams_separate_thoughts_from_answers(site, per_step):
    """Test each API, with any number of tokens at once, while vLLM watches for a stop string."""
    site.says(THOUGHT, "</think>", SAID, per_step=per_step)
    stop = ["the end of it all."]
    chunks = await events(site, CHAT, {**WHERE, "stop": stop})
    deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
    assert "".join(one.get("reasoning") or "" for one in deltas) == THOUGHT
    assert "".join(one.get("content") or "" for one in deltas) == SAID

    said = await events(site, MESSAGES, {**WHERE, "stop_sequences": stop})
    parts = [one["delta"] for one in said if one["type"] == "content_block_delta"]
    assert "".join(one.get("thinking", "") for one in parts) == THOUGHT
    assert "".join(one.get("text", "") for one in parts) == SAID

    asked = {**RESPONSE, "max_output_tokens": 200, "stop": stop}
    found = await events(site, RESPONSES, asked)
    texts = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    for one in found:
        if one["type"] in texts:
            texts[one["type"]] += one["delta"]
    assert list(texts.values()) == [THOUGHT, SAID]

    asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 200, "stop": stop}
    pieces = await events(site, "/v1/completions", asked)
    assert "".join(one["choices"][0]["text"] for one in pieces) == f"{THOUGHT}</think>{SAID}"


@pytest.mark.parametrize("thoughts", [False, True])
async def test_a_response_that_was_cut_is_incomplete(site, thoughts):
    site.says(*((THOUGHT, "</think>") if thoughts else ()), SAID)
    cut = len(THOUGHT) + 1 + 5 if thoughts else 5
    asked = {**RESPONSE, "max_output_tokens": cut}
    found = await events(site, RESPONSES, asked)
    assert found[-1]["type"] == "response.incomplete"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    answers = [found[-1]["response"], await whole(site, RESPONSES, asked)]
    for response in answers:
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"
        assert all(one["status"] != "incomplete" for one in response["output"][:-1])
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert [one["status"] for one in done][-1] == "incomplete"
    assert len(done) == len(answers[0]["output"]) == (2 if thoughts else 1)

    complete = await events(site, RESPONSES, {**asked, "max_output_tokens": 200})
    assert complete[-1]["type"] == "response.completed"
    assert complete[-1]["response"]["output"][-1]["status"] == "completed"


async def test_calls_that_were_cut(site):
    """Each API says that the answer was cut, whole or streamed, so clients do not run an incomplete call."""
    tools = [{"type": "function", "function": TOOL}]
    site.says("</think>", CALL, " and more " * 4)
    body = {**WHERE, "tools": tools, "max_tokens": len(CALL) + 10}
    chunks = await events(site, CHAT, body)
    ends = [one["choices"][0]["finish_reason"] for one in chunks if one["choices"]]
    assert ends[-1] == "length"
    choice = (await whole(site, CHAT, body))["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert choice["finish_reason"] == "length"

    mine = [{"name": "look", "input_schema": {"type": "object"}}]
    message = await whole(site, MESSAGES, {**body, "tools": mine})
    assert (message["stop_reason"], message["content"][-1]["type"]) == ("max_tokens", "tool_use")

    site.says("</think>", '{"where": "Pa')  # a forced call's arguments
    forced = {**WHERE, "tools": mine, "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 13}
    message = await whole(site, MESSAGES, forced)
    assert message["stop_reason"] == "max_tokens"
    assert "Traceback" not in site.process.text


async def test_stop_reasons_of_messages(site):
    site.says("</think>", SAID)
    for fields, reason, sequence in (
        ({}, "end_turn", None),
        ({"max_tokens": 4}, "max_tokens", None),
        ({"stop_sequences": ["Paris"]}, "stop_sequence", "Paris"),
    ):
        message = await whole(site, MESSAGES, {**WHERE, **fields})
        assert (message["stop_reason"], message.get("stop_sequence")) == (reason, sequence)
        said = await events(site, MESSAGES, {**WHERE, **fields})
        delta = next(one["delta"] for one in said if one["type"] == "message_delta")
        assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, sequence)


async def test_fields_that_need_stored_responses_are_refused(site):
    site.says("</think>", SAID)
    async with site.openai(KEY) as client:
        assert (await client.responses.create(**RESPONSE, store=True)).status == "completed"  # the default
        for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "conv_1"}):
            with pytest.raises(openai.BadRequestError, match=f"{next(iter(fields))}: .*'input'"):
                await client.responses.create(**RESPONSE, **fields)
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="responses are not stored here"):
                await call("resp_1")
