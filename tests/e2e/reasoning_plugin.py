"""A reasoning parser for the demo model, which has no tokens for thoughts: two others stand for them."""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

BEGIN, END = "<tool_response>", "</tool_response>"


@ReasoningParserManager.register_module("demo")
class DemoReasoningParser(BaseThinkingReasoningParser):
    """Thoughts end at END; the chat template of the test writes BEGIN."""

    @property
    def start_token(self) -> str:
        return BEGIN

    @property
    def end_token(self) -> str:
        return END
