"""The chat format in Python: the same text as chat_template.jinja, which ships with the weights.

Training must know which text the model has to predict; `segments` marks that text. The format is ChatML with
tool calls as in the Hermes models.
"""

from __future__ import annotations

import json

from dialogues import Dialogue
from dialogues.tools import call_text

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
# One token each, but not special ones: servers strip special tokens before the tool parser runs.
MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_TOOLS_HOW = (
    "To call a tool, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
)


def _system_text(dialogue: Dialogue) -> str | None:
    first = dialogue.messages[0]
    prompt = first.content if first.role == "system" else None
    if not dialogue.tools:
        return prompt
    keys = ("name", "description", "parameters")
    tools = ({key: tool["function"][key] for key in keys} for tool in dialogue.tools)
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    head = f"{prompt}\n\n" if prompt is not None else ""
    return f"{head}You can call these tools:\n<tools>\n{shown}\n</tools>\n{_TOOLS_HOW}"


def segments(dialogue: Dialogue) -> list[tuple[str, bool]]:
    """Return the dialogue in pieces of text; true means that the model has to predict it."""
    pieces: list[tuple[str, bool]] = []
    system = _system_text(dialogue)
    if system is not None:
        pieces.append((f"{IM_START}system\n{system}{IM_END}\n", False))
    for message in dialogue.messages:
        match message.role:
            case "system":
                continue
            case "assistant":
                calls = "\n".join(call_text(call) for call in message.tool_calls)
                gap = "\n" if message.content and calls else ""
                said = f"{message.content}{gap}{calls}{IM_END}"
                pieces += [(f"{IM_START}assistant\n", False), (said, True), ("\n", False)]
            case "tool":
                text = f"<tool_response>\n{message.content}\n</tool_response>"
                pieces.append((f"{IM_START}tool\n{text}{IM_END}\n", False))
            case _:
                pieces.append((f"{IM_START}{message.role}\n{message.content}{IM_END}\n", False))
    return pieces


def rendered(dialogue: Dialogue) -> str:
    return "".join(text for text, _ in segments(dialogue))


def prompt_of(dialogue: Dialogue) -> str:
    """Return the text before the last reply, as a server would get it."""
    return "".join(text for text, _ in segments(dialogue)[:-2])
