"""Responses to prompts, whole or in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.services.offline.errors import RequestError


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, and those of the most likely tokens at its position."""

    token: str
    logprob: float
    top: dict[str, float]


@dataclass(frozen=True)
class Choice:
    """One output for a prompt. `finish_reason` is OpenAI's: stop, length, tool_calls."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Response:
    """The response to one prompt: `n` choices, or an error and no choice."""

    index: int  # number of its prompt
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0  # all choices together
    # Statistics, ignored in comparisons; 0 without speculative decoding.
    draft_steps: int = field(default=0, compare=False)  # engine steps in which a draft was verified
    drafted_tokens: int = field(default=0, compare=False)
    accepted_tokens: int = field(default=0, compare=False)  # drafted tokens that were accepted
    error: RequestError | None = None

    @property
    def first(self) -> Choice:
        """The first choice, the only one unless `n` was given. Raises the prompt's error if it has one."""
        if self.error is not None:
            raise self.error
        return self.choices[0]

    @property
    def text(self) -> str:
        return self.first.text

    @property
    def token_ids(self) -> list[int]:
        return self.first.token_ids

    @property
    def finish_reason(self) -> str:
        return self.first.finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.first.logprobs


@dataclass(frozen=True)
class Piece:
    """A piece of one choice as it is generated. The last one has a `finish_reason`, or an `error`."""

    index: int  # number of its prompt
    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    error: RequestError | None = None


def response(index: int, body: dict[str, Any]) -> Response:
    """Make a Response from the body of a 200 response of either endpoint."""
    usage = body["usage"]
    took = usage["baton"]
    return Response(
        index=index,
        choices=[
            Choice(
                text=_text(choice, "message"),
                token_ids=choice["token_ids"],
                finish_reason=choice["finish_reason"],
                logprobs=_logprobs(choice.get("logprobs")),
            )
            for choice in sorted(body["choices"], key=lambda choice: int(choice["index"]))
        ],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        draft_steps=took["draft_steps"],
        drafted_tokens=took["drafted_tokens"],
        accepted_tokens=took["accepted_tokens"],
    )


def pieces(index: int, event: dict[str, Any]) -> list[Piece]:
    """Return the pieces in an event of a stream, of either endpoint, without empty ones."""
    found = [
        Piece(
            index=index,
            choice=choice["index"],
            text=_text(choice, "delta"),
            token_ids=choice.get("token_ids") or [],
            finish_reason=choice.get("finish_reason"),
            logprobs=_logprobs(choice.get("logprobs")),
        )
        for choice in event["choices"]
    ]
    return [piece for piece in found if piece.text or piece.token_ids or piece.finish_reason]


def _text(choice: dict[str, Any], chat_key: str) -> str:
    text = choice[chat_key].get("content") if chat_key in choice else choice["text"]
    return text or ""


def _logprobs(given: dict[str, Any] | None) -> list[TokenLogprob] | None:
    if not given:
        return None
    if "content" in given:
        return [
            TokenLogprob(
                one["token"], one["logprob"], {top["token"]: top["logprob"] for top in one["top_logprobs"]}
            )
            for one in given["content"] or []
        ]
    tops = given["top_logprobs"] or [{}] * len(given["tokens"])
    return [
        TokenLogprob(token, logprob, top or {})
        for token, logprob, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True)
    ]
