"""Prompts, their options, and the HTTP requests made from them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from baton.services.errors import ConfigError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]  # text or token ids to complete, or a chat


class Options(TypedDict, total=False):
    """Sampling and output options, with the names and defaults of OpenAI's API and vLLM's additions.

    Without `max_tokens` a text is completed with 16 tokens; a chat ends where the model ends it.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    n: int  # choices for each prompt
    seed: int
    stop: str | list[str]
    stop_token_ids: list[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    logprobs: int  # log-probabilities of each token and of this many alternatives
    response_format: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    extra_body: dict[str, Any]  # any other fields of the API


@dataclass(frozen=True)
class Request:
    path: str
    body: dict[str, Any]


def as_list(prompts: Prompt | Iterable[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether a single one was given. An empty list means no prompts."""
    first = next(iter(prompts), None) if isinstance(prompts, Sequence) else None
    if isinstance(prompts, str) or isinstance(first, int | Mapping):
        return [cast(Prompt, prompts)], True
    return list(cast(Iterable[Prompt], prompts)), False


def requests(prompts: Sequence[Prompt], model: str, options: Mapping[str, Any]) -> list[Request]:
    """Return the requests for all prompts. Raises ConfigError for an unknown option or an invalid prompt."""
    _check(options)
    return [_request(prompt, number, model, options) for number, prompt in enumerate(prompts)]


def _check(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in Options.__annotations__:
            close = difflib.get_close_matches(name, Options.__annotations__, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "put other fields of the API into extra_body"
            raise ConfigError(f"unknown option {name!r}; {hint}")


def _request(prompt: Prompt, number: int, model: str, options: Mapping[str, Any]) -> Request:
    body = {"model": model, "return_token_ids": True, "baton": {"usage": True}, **options}
    extra = body.pop("extra_body", None) or {}
    logprobs = body.pop("logprobs", None)
    if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt):
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        if logprobs is not None:
            body["logprobs"] = logprobs
        return Request(COMPLETIONS, {**body, **extra})
    if all(isinstance(message, Mapping) for message in prompt):
        body["messages"] = [dict(message) for message in prompt if isinstance(message, Mapping)]
        if logprobs is not None:
            body.update(logprobs=True, top_logprobs=logprobs)
        return Request(CHAT, {**body, **extra})
    raise ConfigError(
        f"prompt {number} is neither a text, nor token ids, nor a list of messages: {str(prompt)[:80]!r}"
    )
