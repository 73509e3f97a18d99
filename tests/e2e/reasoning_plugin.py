"""A reasoning parser for the demo model, which has no thinking tokens; two other tokens stand in for them."""

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module("demo")
class DemoReasoningParser(BaseThinkingReasoningParser):
    """A parser for a chat template that ends with the start token, so that answers begin in a thought."""

    @property
    def start_token(self):
        return "<tool_response>"

    @property
    def end_token(self):
        return "</tool_response>"
