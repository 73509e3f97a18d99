"""OpenAI's API: the router's answers equal those of stock vLLM with the same model."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from harness.deployment import MODEL_NAME
from harness.support import CALL_S, eventually

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def clients(one_pair, reference):
    with openai.OpenAI(base_url=f"{reference}/v1", api_key="none", timeout=CALL_S, max_retries=0) as stock:
        yield [one_pair.client(), stock]


def both(clients, ask):
    """Return the router's answer after comparing it with stock vLLM's."""
    ours, stock = (ask(client) for client in clients)
    assert ours == stock
    return ours


def plain(answer):
    """Return an answer as data, without fields that differ from call to call."""
    data = answer.model_dump(exclude_none=True)
    for key in ("id", "created", "system_fingerprint"):
        data.pop(key, None)
    for choice in data.get("choices", []):
        for call in choice.get("message", {}).get("tool_calls", None) or []:
            call.pop("id", None)
    return data


def chat(**options):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 14, **options}
    return lambda client: plain(client.chat.completions.create(model=MODEL_NAME, **body))


def complete(**options):
    body = {"prompt": "def main(", "temperature": 0, "max_tokens": 14, **options}
    return lambda client: plain(client.completions.create(model=MODEL_NAME, **body))


def streamed_chat(**options):
    """Return a stream's texts, finish reasons, log-probabilities and usage, however it is chunked."""

    def ask(client):
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 14, **options}
        texts, ends, logprobs, usage = {}, {}, [], None
        for chunk in client.chat.completions.create(model=MODEL_NAME, stream=True, **body):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                ends[choice.index] = choice.finish_reason or ends.get(choice.index)
                if choice.logprobs and choice.logprobs.content:
                    logprobs += [(one.token, round(one.logprob, 3)) for one in choice.logprobs.content]
        return texts, ends, logprobs, usage and usage.model_dump(exclude_none=True)

    return ask


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"n": 2, "temperature": 0.8, "seed": 7},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "seed": 11, "extra_body": {"top_k": 20}},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "max_tokens": 40},
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["e", "zz"]},
        {"stop": [" "]},
        {"extra_body": {"min_tokens": 12, "ignore_eos": True}},
        {"extra_body": {"return_token_ids": True}},
        {"extra_body": {"prompt_logprobs": 2}},
        {"logit_bias": {"100": 50}},
        {"temperature": 0.9, "seed": 4, "extra_body": {"min_p": 0.2}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_chat(clients, options):
    answer = both(clients, chat(**options))
    assert len(answer["choices"]) == options.get("n", 1)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 1},
        {"n": 2, "temperature": 0.8, "seed": 7},
        {"stop": ["a"], "extra_body": {"include_stop_str_in_output": True}},
        {"logprobs": True, "top_logprobs": 2},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_streamed_chat(clients, options):
    texts, ends, _, _ = both(clients, streamed_chat(**options))
    assert len(texts) == options.get("n", 1)
    assert all(ends.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt": ["def main(", "import os\n", "x"]},
        {"prompt": [5, 6, 7, 8]},
        {"echo": True, "max_tokens": 4},
        {"echo": True, "logprobs": 2, "max_tokens": 4},
        # lm-eval's way of finding the most likely of several answers
        {
            "prompt": [[7, *range(300, 310 + n)] for n in range(16)],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
        },
        {"logprobs": 3},
        {"n": 3, "temperature": 0.9, "seed": 1},
        {"suffix": None, "extra_body": {"repetition_penalty": 1.3}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_completions(clients, options):
    both(clients, complete(**options))


def test_a_json_schema_is_kept(clients):
    schema = {"name": "person", "schema": PERSON, "strict": True}
    asked = {
        "messages": [{"role": "user", "content": "Extract as JSON: Anna is 31 years old."}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 80,
    }
    answer = both(clients, chat(**asked))
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    texts, _, _, _ = both(clients, streamed_chat(**asked))
    assert json.loads(texts[0]) == person


def test_tools(clients):
    asked = {
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 60,
    }
    answer = both(clients, chat(**asked))
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    both(clients, chat(**{**asked, "tool_choice": "auto"}))


def test_stops_across_the_borders_of_drafts(clients):
    """With drafts, a stop string may begin in one step and end in the next."""
    asked = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 60}
    text = both(clients, chat(**asked))["choices"][0]["message"]["content"]
    assert len(text) > 100
    for start in range(5, 100, 17):
        stop = text[start : start + 6]
        answer = both(clients, chat(**asked, stop=[stop]))["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert answer["message"]["content"] == text[: text.index(stop)]


@pytest.mark.parametrize("length", range(1, 14))
def test_an_answer_is_as_long_as_asked(clients, length):
    """Accepted drafts beyond the last requested token are dropped."""
    answer = both(clients, chat(max_tokens=length, logprobs=True, extra_body={"min_tokens": length}))
    assert answer["usage"]["completion_tokens"] == length
    assert len(answer["choices"][0]["logprobs"]["content"]) == length


def test_seeds_reproduce_beside_others_that_draft(one_pair, clients):
    """A seed gives the same tokens whatever else is in the batch."""
    seeded = chat(temperature=0.9, seed=5, max_tokens=40)
    alone = both(clients, seeded)
    with ThreadPoolExecutor(6) as pool:
        drafting = chat(max_tokens=60, extra_body={"ignore_eos": True})
        others = [pool.submit(drafting, clients[0]) for _ in range(5)]
        assert seeded(clients[0]) == alone
        for other in others:
            other.result(60)


def test_the_answers_were_drafted(one_pair):
    """Without drafts this module would compare nothing. On a busy machine `auto` may pause them: retry."""
    client, accepted = one_pair.client(), 0

    def enough():
        nonlocal accepted
        asked = client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": "Tell me a story about a fox."}],
            max_tokens=60,
            temperature=0,
            extra_body={"baton": {"usage": True}},
        )
        assert asked.usage is not None
        accepted += (asked.usage.model_extra or {})["baton"]["accepted_tokens"]
        return accepted > 10

    eventually(enough, 30, "more than ten drafted tokens are accepted")


def test_models_and_tokenize(one_pair, reference):
    answers = []
    for url in (one_pair.url, reference):
        models = httpx.get(f"{url}/v1/models").json()["data"]
        tokens = httpx.post(f"{url}/tokenize", json={"model": MODEL_NAME, "prompt": "def main():"}).json()
        text = httpx.post(f"{url}/detokenize", json={"model": MODEL_NAME, "tokens": tokens["tokens"]}).json()
        answers.append(([(m["id"], m["max_model_len"]) for m in models], tokens, text))
    assert answers[0] == answers[1]


WRONG = {
    "too long a prompt": {"prompt": [7] * 1500},
    "unknown model": {"model": "nobody"},
    "negative max_tokens": {"max_tokens": -1},
    "temperature too high": {"temperature": "hot"},
    "prompt of a wrong type": {"prompt": {"a": 1}},
    "n of zero": {"n": 0},
    "no prompt": {"prompt": None},
    "stop of a wrong type": {"stop": 3},
    "logprobs too many": {"logprobs": 100_000},
    "a token that is none": {"prompt": [10_000_000]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_gets_the_same_answer(one_pair, reference, wrong):
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 4, **wrong}
    ours, stock = (
        httpx.post(f"{url}/v1/completions", json=body, timeout=CALL_S) for url in (one_pair.url, reference)
    )
    assert (ours.status_code, ours.json()) == (stock.status_code, stock.json())
    assert 400 <= ours.status_code < 500
    assert ours.json()["error"]["message"]


def test_broken_json_gets_the_same_answer(one_pair, reference):
    headers = {"Content-Type": "application/json"}
    ours, stock = (
        httpx.post(f"{url}/v1/chat/completions", content=b'{"model": ', headers=headers, timeout=CALL_S)
        for url in (one_pair.url, reference)
    )
    assert (ours.status_code, ours.json()) == (stock.status_code, stock.json())


def test_a_client_cannot_set_what_is_ours(one_pair, reference):
    """Baton's internal request fields are dropped when a client sends them."""
    ours = {"kv_transfer_params": {"baton": "load", "epoch": 9}, "vllm_xargs": {"baton_output_tokens": 3}}
    body = {"model": MODEL_NAME, "prompt": "def main(", "max_tokens": 8, "temperature": 0}
    with_ours = httpx.post(f"{one_pair.url}/v1/completions", json={**body, **ours}, timeout=CALL_S)
    without = httpx.post(f"{reference}/v1/completions", json=body, timeout=CALL_S)
    assert with_ours.status_code == 200
    assert with_ours.json()["choices"][0]["text"] == without.json()["choices"][0]["text"]
