"""Generated dialogues for the demo model."""

from . import copying, extraction, facts, lists, numbers, python_code, smalltalk, stories, tools
from .base import GENERATORS, Dialogue, Generator, Message, ToolCall, is_held_out, register, stream

register(numbers, copying, lists, facts, extraction, python_code, smalltalk, stories, tools)

__all__ = ["GENERATORS", "Dialogue", "Generator", "Message", "ToolCall", "is_held_out", "stream"]
