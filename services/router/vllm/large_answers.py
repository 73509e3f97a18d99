"""Build whole answers with many log-probabilities a slice at a time.

vLLM builds and encodes an answer in one go: 42,000 log-probabilities blocked the loop for 0.9 s. Here the
long lists are left out at first, then built and encoded in slices before the answer is sent.

Leans on: vllm.entrypoints.openai.{chat_completion,completion}.api_router and
vllm.entrypoints.scale_out.token_in_token_out.api_router, which send
`JSONResponse(content=answer.model_dump())`; the answers' fields choices, logprobs and prompt_logprobs;
OpenAIServingChat.chat_completion_full_generator and _create_chat_logprobs, which makes a token's entry from
that token's items of its first two arguments alone.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.scale_out.token_in_token_out import api_router as token_routes
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateTextResponse,
    GenerateTokensResponse,
)

LONG = 64  # a list of at least this many entries is left out at first
TURN = 8  # entries built in one iteration of the loop; one with 20 alternatives takes 0.5 ms

_ANSWERS = (ChatCompletionResponse, CompletionResponse, GenerateTextResponse, GenerateTokensResponse)
_Path = tuple[str | int, ...]

_whole: ContextVar[bool] = ContextVar("the answer is not streamed", default=False)


def install() -> None:
    """Make this process's front end build long answers in slices; a second call does nothing."""
    if chat_routes.JSONResponse is _Response:
        return
    for routes in (chat_routes, completion_routes, token_routes):
        routes.JSONResponse = _Response
    for kind in _ANSWERS:
        kind.model_dump = _dumped_later(kind.model_dump)
    handlers = OpenAIServingChat
    handlers._create_chat_logprobs = _made_later(handlers._create_chat_logprobs)
    handlers.chat_completion_full_generator = _not_streamed(handlers.chat_completion_full_generator)


class _Entries(list[Any]):
    def __init__(self, length: int, make: Callable[[int, int], list[Any]]) -> None:
        super().__init__()
        self.length = length
        self.make = make


class _Later:
    def __init__(self, dump: Callable[..., dict[str, Any]], long: dict[_Path, list[Any]]) -> None:
        self._dump = dump
        self._long = long

    async def encode(self) -> bytes:
        """Return the same JSON as JSONResponse. Raises ValueError for NaN or infinity."""
        exclude: dict[str | int, Any] = {}
        for path in self._long:
            _set(exclude, path, True)
        data = self._dump(exclude=exclude)
        marks = {secrets.token_hex(16): entries for entries in self._long.values()}
        for path, mark in zip(self._long, marks, strict=True):
            _set(data, path, mark)
        text = _json(data)
        whole = bytearray()
        for mark in sorted(marks, key=text.index):
            before, _, text = text.partition(f'"{mark}"')
            whole += before.encode() + b"["
            for number, turn in enumerate(_turns(marks[mark])):
                whole += (b"," if number else b"") + turn
                await asyncio.sleep(0)
            whole += b"]"
        return bytes(whole + text.encode())


class _Response(JSONResponse):
    def __init__(self, content: Any = None, *args: Any, **kwargs: Any) -> None:
        self._later = content if isinstance(content, _Later) else None
        super().__init__(None if self._later else content, *args, **kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._later is not None:
            self.body = await self._later.encode()
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def _dumped_later(dump: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    @wraps(dump)
    def model_dump(self: BaseModel, **how: Any) -> Any:
        long = {} if how else _long_lists(self)
        return _Later(lambda **left_out: dump(self, **left_out), long) if long else dump(self, **how)

    return model_dump


def _made_later(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def _create_chat_logprobs(
        self: Any, token_ids: Sequence[int], top_logprobs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not _whole.get() or len(token_ids) < LONG:
            return make(self, token_ids, top_logprobs, *args, **kwargs)

        def entries(begin: int, end: int) -> list[Any]:
            made = make(self, token_ids[begin:end], top_logprobs[begin:end], *args, **kwargs)
            return list(made.content)

        return ChatCompletionLogProbs.model_construct(content=_Entries(len(token_ids), entries))

    return _create_chat_logprobs


def _not_streamed(handler: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(handler)
    async def chat_completion_full_generator(*args: Any, **kwargs: Any) -> Any:
        _whole.set(True)  # only in the context of this request's task
        return await handler(*args, **kwargs)

    return chat_completion_full_generator


def _long_lists(answer: Any) -> dict[_Path, list[Any]]:
    found: dict[_Path, Any] = {("prompt_logprobs",): getattr(answer, "prompt_logprobs", None)}
    for number, choice in enumerate(answer.choices):
        found["choices", number, "prompt_logprobs"] = getattr(choice, "prompt_logprobs", None)
        if choice.logprobs is not None:
            for name, value in choice.logprobs:
                found["choices", number, "logprobs", name] = value
    return {path: one for path, one in found.items() if isinstance(one, list) and _length(one) >= LONG}


def _length(entries: list[Any]) -> int:
    return entries.length if isinstance(entries, _Entries) else len(entries)


def _turns(entries: list[Any]) -> Iterator[bytes]:
    make = entries.make if isinstance(entries, _Entries) else lambda begin, end: entries[begin:end]
    for begin in range(0, _length(entries), TURN):
        yield _json(to_jsonable_python(make(begin, begin + TURN)))[1:-1].encode()


def _set(data: Any, path: _Path, value: Any) -> None:
    *parents, name = path
    for key in parents:
        data = data.setdefault(key, {}) if isinstance(data, dict) else data[key]
    data[name] = value


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
