import json

import openai
import pytest
import pytest_asyncio

from harness.api_site import ApiSite
from harness.fake_worker import MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

THOUGHT, SAID = "Let me see. ", "It is Paris, of course."
MESSAGES = [{"role": "user", "content": "Where?"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200}
TOOL = {"name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "Paris"}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory):
    engine = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
    async with ApiSite(tmp_path_factory.mktemp("endings"), engine=engine) as made:
        yield made


async def events(site, path, body):
    """Return the events of a stream as data."""
    async with site.http() as http:
        got = await http.post(path, json={**body, "stream": True})
    assert got.status_code == 200, got.text
    lines = [line.removeprefix("data: ") for line in got.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def whole(site, path, body):
    async with site.http() as http:
        got = await http.post(path, json=body)
    assert got.status_code == 200, got.text
    return got.json()


@pytest.mark.parametrize("per_step", [1, 3, 16, 200])
async def test_streams_separate_thoughts_from_answers(site, per_step):
    """Test each API, with any number of tokens at once, while vLLM watches for a stop string."""
    site.says(THOUGHT, "</think>", SAID, per_step=per_step)
    stop = ["the end of it all."]
    chunks = await events(site, "/v1/chat/completions", {**CHAT, "stop": stop})
    deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
    assert "".join(one.get("reasoning") or "" for one in deltas) == THOUGHT
    assert "".join(one.get("content") or "" for one in deltas) == SAID

    said = await events(site, "/v1/messages", {**CHAT, "stop_sequences": stop})
    parts = [one["delta"] for one in said if one["type"] == "content_block_delta"]
    assert "".join(one.get("thinking", "") for one in parts) == THOUGHT
    assert "".join(one.get("text", "") for one in parts) == SAID

    asked = {"model": MODEL, "input": "Where?", "max_output_tokens": 200, "stop": stop}
    found = await events(site, "/v1/responses", asked)
    texts = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    for one in found:
        if one["type"] in texts:
            texts[one["type"]] += one["delta"]
    assert list(texts.values()) == [THOUGHT, SAID]

    pieces = await events(
        site, "/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 200, "stop": stop}
    )
    assert "".join(one["choices"][0]["text"] for one in pieces) == f"{THOUGHT}</think>{SAID}"


@pytest.mark.parametrize("thoughts", [False, True])
async def test_a_response_that_was_cut_is_incomplete(site, thoughts):
    site.says(*((THOUGHT, "</think>") if thoughts else ()), SAID)
    cut = len(THOUGHT) + 1 + 5 if thoughts else 5
    asked = {"model": MODEL, "input": "Where?", "max_output_tokens": cut}
    found = await events(site, "/v1/responses", asked)
    assert found[-1]["type"] == "response.incomplete"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    answers = [found[-1]["response"], await whole(site, "/v1/responses", asked)]
    for response in answers:
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"
        assert all(one["status"] != "incomplete" for one in response["output"][:-1])
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert [one["status"] for one in done][-1] == "incomplete"
    assert len(done) == len(answers[0]["output"]) == (2 if thoughts else 1)

    complete = await events(site, "/v1/responses", {**asked, "max_output_tokens": 200})
    assert complete[-1]["type"] == "response.completed"
    assert complete[-1]["response"]["output"][-1]["status"] == "completed"


async def test_openais_client_understands_a_cut_response(site):
    site.says(SAID)
    async with site.openai() as client:
        answer = await client.responses.create(model=MODEL, input="Where?", max_output_tokens=3)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        stream = await client.responses.create(model=MODEL, input="Where?", max_output_tokens=3, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_calls_that_were_cut(site):
    """Each API says that the answer was cut, whole or streamed, so clients do not run an incomplete call."""
    tools = [{"type": "function", "function": TOOL}]
    site.says("</think>", CALL, " and more " * 4)
    body = {**CHAT, "tools": tools, "max_tokens": len(CALL) + 10}
    chunks = await events(site, "/v1/chat/completions", body)
    ends = [one["choices"][0]["finish_reason"] for one in chunks if one["choices"]]
    assert ends[-1] == "length"
    choice = (await whole(site, "/v1/chat/completions", body))["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert choice["finish_reason"] == "length"

    mine = [{"name": "look", "input_schema": {"type": "object"}}]
    message = await whole(site, "/v1/messages", {**body, "tools": mine})
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["type"] == "tool_use"

    site.says("</think>", '{"where": "Pa')  # a forced call's arguments
    forced = {**CHAT, "tools": mine, "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 13}
    message = await whole(site, "/v1/messages", forced)
    assert message["stop_reason"] == "max_tokens"
    assert "Traceback" not in site.process.text


async def test_stop_reasons_of_messages(site):
    site.says("</think>", SAID)
    for fields, reason, sequence in (
        ({}, "end_turn", None),
        ({"max_tokens": 4}, "max_tokens", None),
        ({"stop_sequences": ["Paris"]}, "stop_sequence", "Paris"),
    ):
        message = await whole(site, "/v1/messages", {**CHAT, **fields})
        assert (message["stop_reason"], message.get("stop_sequence")) == (reason, sequence)
        said = await events(site, "/v1/messages", {**CHAT, **fields})
        delta = next(one["delta"] for one in said if one["type"] == "message_delta")
        assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, sequence)


async def test_fields_that_need_stored_responses_are_refused(site):
    site.says("</think>", SAID)
    asked = {"model": MODEL, "input": "Where?"}
    async with site.openai() as client:
        assert (await client.responses.create(**asked, store=True)).status == "completed"  # the default
        for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "conv_1"}):
            with pytest.raises(openai.BadRequestError, match=f"{next(iter(fields))}: .*'input'"):
                await client.responses.create(**asked, **fields)
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="responses are not stored here"):
                await call("resp_1")
