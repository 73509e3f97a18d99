"""Client features, with 20 answers each that must not change when a worker dies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.prompts import prompts

TOKENS = 24  # limit of an answer
ANSWERS = 20  # per feature
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
    """A feature: an endpoint, and the fields of a request or a function that returns them.

    The function gets the answer's number and the plain answer to the same prompt.
    """

    name: str
    path: str
    options: Body | Callable[[int, str], Body]
    prompts: Sequence[list[int]] = ()  # used instead of real text

    def body(self, number: int, plain: str) -> Body:
        """Return the request for an answer."""
        own = self.options if isinstance(self.options, dict) else self.options(number, plain)
        if self.path == _COMPLETIONS:
            asked: Body = {"prompt": self.prompts[number] if self.prompts else _prompt(number)}
        else:
            asked = {"messages": _said(f"Tell me a story about {_SUBJECTS[number]}.")}
        return {**asked, "temperature": 0, "max_tokens": TOKENS, **own}


def _complete(name: str, **options: Any) -> Feature:
    return Feature(name, _COMPLETIONS, options)


def _chat(name: str, **options: Any) -> Feature:
    return Feature(name, CHAT, options)


def _calling(name: str, **options: Any) -> Feature:
    def body(number: int, _: str) -> Body:
        city = ("Paris", "Rome", "Oslo")[number % 3]
        question = f"What is the weather in {city}? I want {number % 7 + 2} days."
        return {"messages": _said(question), "tools": [_WEATHER], "max_tokens": 40, **options}

    return Feature(name, CHAT, body)


def _stopping(name: str, **options: Any) -> Feature:
    """Return a feature with a stop string from the middle of the plain answer, across token boundaries."""

    def body(_: int, plain: str) -> Body:
        return {"stop": [plain[len(plain) * 2 // 3 :][:4], "\x00"], **options}

    return Feature(name, _COMPLETIONS, body)


def _said(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _prompt(number: int) -> list[int]:
    """Return a prompt of 20 to 160 tokens; some prompts share a prefix."""
    chosen = [prompt for prompt in prompts() if 20 <= len(prompt) <= 160]
    return chosen[number % len(chosen)]


_COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
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
    _complete("greedy"),
    _chat("stream with usage", stream=True, stream_options={"include_usage": True}),
    _chat("logprobs", logprobs=True, top_logprobs=3),
    _complete("logprobs, streamed", logprobs=2, stream=True),
    _complete("prompt logprobs and echo", logprobs=1, echo=True),
    _stopping("stop string", stream=False, include_stop_str_in_output=False),
    _stopping("stop string, streamed and kept", stream=True, include_stop_str_in_output=True),
    _complete("stop token, min_tokens", stop_token_ids=_THIRDS, min_tokens=14),
    _chat("end of sequence, min_tokens", min_tokens=18, max_tokens=40),
    _complete("frequency_penalty", frequency_penalty=1.7),
    _complete("presence_penalty", presence_penalty=1.9),
    _complete("repetition_penalty", repetition_penalty=1.6),
    _complete("logit_bias, min_p", logit_bias={"300": 4.0, "13": -100.0}, min_p=0.1),
    _complete("bad_words", bad_words=[" the", " self", "return"]),
    _complete("allowed_token_ids", allowed_token_ids=list(range(50, 4096, 5))),
    _complete("repetition_detection", repetition_detection=_REPEATED),
    _complete("seed", temperature=1.0, seed=17),
    _chat("seed, top_p, top_k, penalty", **_MIXED),
    _complete("n=3, seed", n=3, temperature=1.0, seed=3),
    _chat("n=2, seed, streamed", n=2, temperature=0.9, seed=9, stream=True),
    _complete("regex", structured_outputs={"regex": _PATTERN}),
    _complete("choice", structured_outputs={"choice": _CHOICES}),
    _chat("JSON schema", response_format=_JSON, max_tokens=40, **_CLOSED),
    _complete("grammar", structured_outputs={"grammar": _GRAMMAR}),
    _chat("tools: required", tool_choice="required", **_TOOLS),
    _chat("tools: named, streamed", tool_choice=_CHOICE, stream=True, **_TOOLS),
    _calling("tools: auto", stream=False),
    _calling("tools: auto, streamed", stream=True),
    _chat("reasoning", max_tokens=32),
    _chat("reasoning, streamed", stream=True, max_tokens=32),
    _chat("reasoning, JSON schema", response_format=_JSON, max_tokens=48),
]


def of_prompts(prompts: Sequence[list[int]]) -> list[Feature]:
    """Return features for completions of these prompts, for models without a chat template."""
    kinds: dict[str, Body] = {
        "greedy": {},
        "streamed": {"stream": True},
        "penalty": {"frequency_penalty": 1.7},
    }
    return [Feature(name, _COMPLETIONS, {"ignore_eos": True, **own}, prompts) for name, own in kinds.items()]


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
