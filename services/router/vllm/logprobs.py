"""Limit how many log-probabilities a request may ask for, and pass those of a prompt to vLLM in slices.

Each takes 20 to 50 us on the event loop that serves all streams. Those of a prompt arrive all at once.

Leans on: SamplingParams (num_logprobs, logprob_token_ids, prompt_logprobs, prompt_logprob_token_ids),
vllm.v1.outputs.LogprobsTensors (its first three fields have a row for each position), and
vllm.v1.engine.logprobs.LogprobsProcessor._update_prompt_logprobs, which appends rows to those that it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.outputs import LogprobsTensors

from baton.services.router.errors import RequestFailed, Unsupported
from baton.tasks import spawn_apart

MOST_AT_A_TOKEN = 1024  # limit per generated token; this many take about 40 ms of the loop's time
MOST_OF_A_PROMPT = 1 << 18  # limit per prompt: two per token of a 128k prompt
SLICE = 256  # processed in one iteration of the loop, in about 5 ms

log = logging.getLogger(__name__)


def at_a_token(params: Any, vocabulary: int) -> int:
    """Return how many log-probabilities are kept per generated token, including the token's own."""
    return _width(params.num_logprobs, vocabulary)


def of_the_prompt(params: Any, vocabulary: int, prompt_tokens: int) -> int:
    scored = params.prompt_logprob_token_ids
    rows = [len(row) for row in scored] if scored is not None else ()
    return _width(params.prompt_logprobs, vocabulary) * prompt_tokens + sum(rows)


def check(params: Any, vocabulary: int, prompt_tokens: int) -> None:
    """Check the number of log-probabilities that a request asks for. Raises Unsupported."""
    if (wanted := at_a_token(params, vocabulary)) > MOST_AT_A_TOKEN:
        raise Unsupported(
            f"the request asks for {wanted} log-probabilities of each token (logprobs, top_logprobs); "
            f"{MOST_AT_A_TOKEN} are allowed"
        )
    if (wanted := of_the_prompt(params, vocabulary, prompt_tokens)) > MOST_OF_A_PROMPT:
        raise Unsupported(
            f"the request asks for {wanted} log-probabilities of its prompt of {prompt_tokens} tokens "
            f"(prompt_logprobs, or echo with logprobs); {MOST_OF_A_PROMPT} are allowed: ask for fewer, or "
            "send a shorter prompt"
        )


def _width(asked: int | None, vocabulary: int) -> int:
    if asked is None:
        return 0
    return 1 + (vocabulary if asked == -1 else asked)


class PromptLogprobs:
    """Holds back a request's outputs while its prompt's log-probabilities are processed."""

    def __init__(self, put: Callable[[Any], None], fail: Callable[[str, RequestFailed], None]) -> None:
        """Pass outputs to `put`; end a request with `fail` if vLLM refuses its log-probabilities."""
        self._put = put
        self._fail = fail
        self._held: dict[str, list[Any]] = {}  # outputs by request id
        self._turn = asyncio.Lock()  # one slice per iteration of the loop, for all requests together
        # Set by the front end: adds rows to the log-probabilities of a request's prompt.
        self.add: Callable[[str, LogprobsTensors], None] = lambda *_: None

    def takes(self, output: Any) -> bool:
        """Hold an output back if it must wait, to pass it on later; return whether it is held."""
        if (held := self._held.get(output.request_id)) is not None:
            held.append(output)
            return True
        if (rows := output.new_prompt_logprobs_tensors) is None:
            return False
        self._held[output.request_id] = [output]
        spawn_apart(self._make(output.request_id, rows), f"prompt log-probabilities {output.request_id}")
        return True

    def drop(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    async def _make(self, request_id: str, rows: Any) -> None:
        held = self._held[request_id]
        count, width = rows.logprobs.shape
        step = max(1, SLICE // width)
        try:
            for begin in range(0, count, step):
                async with self._turn:
                    if self._held.get(request_id) is not held:
                        return  # the request has ended
                    some = (array[begin : begin + step] for array in rows[:3])
                    self.add(request_id, LogprobsTensors(*some))
                    await asyncio.sleep(0)
        except Exception:
            log.exception("the log-probabilities of request %s's prompt cannot be read", request_id)
            self.drop(request_id)
            self._fail(request_id, RequestFailed("the log-probabilities of the prompt cannot be read"))
            return
        if self._held.get(request_id) is held:
            del self._held[request_id]
            held[0].new_prompt_logprobs_tensors = None
            for output in held:
                self._put(output)
