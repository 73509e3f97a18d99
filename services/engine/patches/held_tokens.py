"""Stream a token's id together with its text, even if the text may still contain a stop string.

vLLM holds back as many characters as the longest stop string has, but sends the ids of their tokens at once.
A reasoning parser that sees the id of a thought's end then looks for the end mark in text that has not
arrived, and streams the thought twice. Here whole tokens are held back, with their ids and log-probabilities.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from baton.services.engine.patches.replace import replaces

_HELD = "_baton_held"  # attribute of a detokenizer


class HeldTokens:
    """The tokens of one stream whose text has not been sent yet. Replaces two methods of the detokenizer."""

    __slots__ = ("_decode", "_detokenizer", "_ends", "_next_text", "sent")

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer
        self._decode = detokenizer.decode_next
        self._next_text = detokenizer.get_next_output_text
        self._ends: list[int] = []  # where each token's text ends
        self.sent = 0  # tokens sent
        detokenizer.decode_next = self._decode_next
        detokenizer.get_next_output_text = self._get_next_output_text

    def ripe(self) -> int:
        """Return how many tokens have no character that a stop string could still remove."""
        detokenizer = self._detokenizer
        return bisect_right(self._ends, len(detokenizer.output_text) - detokenizer.stop_buffer_length)

    def ids(self, ripe: int) -> list[int]:
        tokens: list[int] = self._detokenizer.token_ids
        prompt = len(tokens) - self._detokenizer.num_output_tokens()  # 0 except with a slow tokenizer
        return tokens[prompt + self.sent : prompt + ripe]

    def _decode_next(self, token_id: int) -> str:
        text: str = self._decode(token_id)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))
        return text

    def _get_next_output_text(self, finished: bool, delta: bool) -> str:
        if finished or not delta:
            whole: str = self._next_text(finished, delta)
            return whole
        detokenizer = self._detokenizer
        ripe = self.ripe()
        begin, end = detokenizer._last_output_text_offset, self._ends[ripe - 1] if ripe else 0
        detokenizer._last_output_text_offset = end
        text: str = detokenizer.output_text[begin:end]
        return text


@replaces("vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request")
def _hold(original: Any, cls: Any, tokenizer: Any, request: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    made = original(cls, tokenizer, request)
    streams = request.sampling_params.output_kind == RequestOutputKind.DELTA
    if streams and getattr(made, "stop_buffer_length", 0):
        setattr(made, _HELD, HeldTokens(made))
    return made


@replaces("vllm.v1.engine.output_processor:RequestState._new_completion_output")
def _send_together(
    original: Any, self: Any, token_ids: list[int], finish_reason: Any, stop_reason: Any
) -> Any:
    held: HeldTokens | None = getattr(self.detokenizer, _HELD, None)
    if held is None:
        return original(self, token_ids, finish_reason, stop_reason)
    finished = finish_reason is not None
    ripe = self.detokenizer.num_output_tokens() if finished else held.ripe()
    output = original(self, held.ids(ripe), finish_reason, stop_reason)
    if (logprobs := self.logprobs_processor.logprobs) is not None:
        output.logprobs = logprobs[held.sent : ripe]
    held.sent = ripe
    return output
