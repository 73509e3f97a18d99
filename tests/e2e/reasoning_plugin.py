"""A reasoning parser for the demo model, which has no tokens for thoughts: two others stand in for them."""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module("demo")
class DemoReasoningParser(BaseThinkingReasoningParser):
    """A parser for a chat template that ends with the first mark, so that answers begin with a thought."""

    @property
    def start_token(self) -> str:
        return "<tool_response>"

    @property
    def end_token(self) -> str:
        return "</tool_response>"
