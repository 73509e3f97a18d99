"""Client features, with 20 answers each, which must not change when a worker dies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.prompts import prompts

TOKENS = 24  # limit of an answer
ANSWERS = 20  # each feature's
_SUBJECTS = (
    "rain", "Paris", "bread", "the moon", "Python", "a river", "music", "whales", "gravity", "salt",
    "Rome", "bicycles", "tea", "the sun", "clocks", "glass", "ants", "snow", "paper", "iron",
)  # fmt: skip
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                "days": {"type": "integer", "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
_CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}

Body = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """A feature. `body` makes a request from the answer's number and the plain answer to the same prompt."""

    name: str
    path: str
    body: Callable[[int, str], Body]
    logprobs: bool = False  # the answer must have some


def _complete(**options: Any) -> Callable[[int, str], Body]:
    def body(number: int, plain: str) -> Body:
        del plain
        return {"prompt": _prompt(number), "temperature": 0, "max_tokens": TOKENS, **options}

    return body


def _chat(**options: Any) -> Callable[[int, str], Body]:
    def body(number: int, plain: str) -> Body:
        del plain
        question = f"Tell me a story about {_SUBJECTS[number]}."
        messages = [{"role": "user", "content": question}]
        return {"messages": messages, "temperature": 0, "max_tokens": TOKENS, **options}

    return body


def _calling(*, stream: bool) -> Callable[[int, str], Body]:
    """Make requests in which the model decides to call the tool."""

    def body(number: int, plain: str) -> Body:
        city = ("Paris", "Rome", "Oslo")[number % 3]
        question = f"What is the weather in {city}? I want {number % 7 + 2} days."
        messages = [{"role": "user", "content": question}]
        return _chat(messages=messages, tools=[_WEATHER], max_tokens=40, stream=stream)(number, plain)

    return body


def _prompt(number: int) -> list[int]:
    """Return a prompt of 20 to 160 tokens; some share a prefix."""
    chosen = [prompt for prompt in prompts() if 20 <= len(prompt) <= 160]
    return chosen[number % len(chosen)]


def _stopping(*, stream: bool, keep: bool) -> Callable[[int, str], Body]:
    """Make requests with a stop string from the middle of the plain answer, across token boundaries."""

    def body(number: int, plain: str) -> Body:
        stop = [plain[len(plain) * 2 // 3 :][:4], "\x00"]
        return _complete(stop=stop, stream=stream, include_stop_str_in_output=keep)(number, plain)

    return body


_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_JSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}
_TOOLS = {"tools": [_WEATHER], "max_tokens": 40, **_CLOSED}
_REPEATED = {"max_pattern_size": 4, "min_count": 3}
_THIRDS = list(range(3, 4096, 3))
_CHOICE = {"type": "function", "function": {"name": "get_weather"}}

_PATTERN = "[a-f]{3}[0-9]{4}[u-z]{5}[A-D]{2}[0-9]{10,}"
_GRAMMAR = 'root ::= "(" root ")" | [a-z]+ "+" root | [0-9]+ "*" root'
_CHOICES = ["a long winded answer to it", "another one, as long as it"]
_MIXED = {"temperature": 1.1, "seed": 5, "top_p": 0.9, "top_k": 60, "frequency_penalty": 0.8}

FEATURES = [
    Feature("greedy", _COMPLETIONS, _complete()),
    Feature("stream with usage", _CHAT, _chat(stream=True, stream_options={"include_usage": True})),
    Feature("logprobs", _CHAT, _chat(logprobs=True, top_logprobs=3), logprobs=True),
    Feature("logprobs, streamed", _COMPLETIONS, _complete(logprobs=2, stream=True), logprobs=True),
    Feature("prompt logprobs and echo", _COMPLETIONS, _complete(logprobs=1, echo=True), logprobs=True),
    Feature("stop string", _COMPLETIONS, _stopping(stream=False, keep=False)),
    Feature("stop string, streamed and kept", _COMPLETIONS, _stopping(stream=True, keep=True)),
    Feature("stop token, min_tokens", _COMPLETIONS, _complete(stop_token_ids=_THIRDS, min_tokens=14)),
    Feature("end of sequence, min_tokens", _CHAT, _chat(min_tokens=18, max_tokens=40)),
    Feature("frequency_penalty", _COMPLETIONS, _complete(frequency_penalty=1.7)),
    Feature("presence_penalty", _COMPLETIONS, _complete(presence_penalty=1.9)),
    Feature("repetition_penalty", _COMPLETIONS, _complete(repetition_penalty=1.6)),
    Feature("logit_bias, min_p", _COMPLETIONS, _complete(logit_bias={"300": 4.0, "13": -100.0}, min_p=0.1)),
    Feature("bad_words", _COMPLETIONS, _complete(bad_words=[" the", " self", "return"])),
    Feature("allowed_token_ids", _COMPLETIONS, _complete(allowed_token_ids=list(range(50, 4096, 5)))),
    Feature("repetition_detection", _COMPLETIONS, _complete(repetition_detection=_REPEATED)),
    Feature("seed", _COMPLETIONS, _complete(temperature=1.0, seed=17)),
    Feature("seed, top_p, top_k, penalty", _CHAT, _chat(**_MIXED)),
    Feature("n=3, seed", _COMPLETIONS, _complete(n=3, temperature=1.0, seed=3)),
    Feature("n=2, seed, streamed", _CHAT, _chat(n=2, temperature=0.9, seed=9, stream=True)),
    Feature("regex", _COMPLETIONS, _complete(structured_outputs={"regex": _PATTERN})),
    Feature("choice", _COMPLETIONS, _complete(structured_outputs={"choice": _CHOICES})),
    Feature("JSON schema", _CHAT, _chat(response_format=_JSON, max_tokens=40, **_CLOSED)),
    Feature("grammar", _COMPLETIONS, _complete(structured_outputs={"grammar": _GRAMMAR})),
    Feature("tools: required", _CHAT, _chat(tool_choice="required", **_TOOLS)),
    Feature("tools: named, streamed", _CHAT, _chat(tool_choice=_CHOICE, stream=True, **_TOOLS)),
    Feature("tools: auto", _CHAT, _calling(stream=False)),
    Feature("tools: auto, streamed", _CHAT, _calling(stream=True)),
    Feature("reasoning", _CHAT, _chat(max_tokens=32)),
    Feature("reasoning, streamed", _CHAT, _chat(stream=True, max_tokens=32)),
    Feature("reasoning, JSON schema", _CHAT, _chat(response_format=_JSON, max_tokens=48)),
]  # fmt: skip


def of_prompts(prompts: Sequence[list[int]]) -> list[Feature]:
    """Return features for completions of these prompts, for models without a chat template."""

    def complete(**options: Any) -> Callable[[int, str], Body]:
        def body(number: int, plain: str) -> Body:
            return {**_complete(ignore_eos=True, **options)(number, plain), "prompt": prompts[number]}

        return body

    return [
        Feature("greedy", _COMPLETIONS, complete()),
        Feature("greedy, streamed", _COMPLETIONS, complete(stream=True)),
        Feature("frequency_penalty", _COMPLETIONS, complete(frequency_penalty=1.7)),
    ]


def plain_body(number: int) -> Body:
    """Return the request whose answer provides the stop strings."""
    return _complete()(number, "")


def whole(status: int, text: str, streamed: bool) -> Any:
    """Return an answer as data without ids and times. Raises AssertionError if it failed."""
    assert status == 200, f"{status}: {text}"
    if not streamed:
        return _without(json.loads(text), ("id", "created", "system_fingerprint"))
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices: dict[int, Any] = {}
    usage = None
    for chunk in chunks:
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            _gather(choices.setdefault(choice["index"], {}), choice)
    assert text.rstrip().endswith("[DONE]"), text[-200:]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _gather(into: dict[str, Any], piece: dict[str, Any]) -> None:
    """Merge a chunk's choice, or a part of it, into the earlier ones. Text and lists are concatenated."""
    for key, value in piece.items():
        if value is None or (key in {"id", "created"} and not isinstance(value, dict)):
            continue
        if isinstance(value, dict):
            _gather(into.setdefault(key, {}), value)
        elif key == "tool_calls":
            for call in value:
                _gather(into.setdefault(key, {}).setdefault(call["index"], {}), call)
        elif isinstance(value, list):
            into.setdefault(key, []).extend(_without(value, ("id",)))
        elif isinstance(value, str) and key not in {"role", "finish_reason", "type", "name"}:
            # Whether vLLM's parser drops a second `</think>` depends on the chunks.
            into[key] = into.get(key, "") + value.replace("</think>", "")
        else:
            into[key] = value


def _without(data: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(data, dict):
        return {key: _without(value, keys) for key, value in data.items() if key not in keys}
    return [_without(one, keys) for one in data] if isinstance(data, list) else data


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Return where two answers first differ, or "". Log-probabilities may differ by less than 1e-3."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        found = (difference(ours[key], theirs[key], f"{where}.{key}") for key in ours)
        return next(filter(None, found), "")
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        found = (difference(one, theirs[at], f"{where}[{at}]") for at, one in enumerate(ours))
        return next(filter(None, found), "")
    if isinstance(ours, float) and isinstance(theirs, float) and abs(ours - theirs) < 1e-3:
        return ""
    return "" if ours == theirs else f"{where}: {ours!r} is not {theirs!r}"
