"""A reasoning parser for the demo model, which has no tokens for thoughts: two others stand for them."""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module("demo")
class DemoReasoningParser(BaseThinkingReasoningParser):
    """The chat template of the test writes the first mark, so a thought begins with the answer."""

    @property
    def start_token(self) -> str:
        return "<tool_response>"

    @property
    def end_token(self) -> str:
        return "</tool_response>"
