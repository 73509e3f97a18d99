"""Tool calls, their results, and questions that need no tool."""

from __future__ import annotations

import json
import operator
from random import Random
from typing import Any

from .base import TEXTS, Dialogue, Message, ToolCall, pick
from .facts import capital
from .smalltalk import about_the_assistant, greeting
from .words import CITIES, FIRST_NAMES, THINGS, made_up_word, topic

_TOOLS = TEXTS["tools"]
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _arguments(rng: Random, tool: str) -> dict[str, Any]:
    match tool:
        case "get_weather" | "get_time":
            return {"city": rng.choice(CITIES)}
        case "calculate":
            return {"expression": f"{rng.randint(1, 9999)} {rng.choice('+-*')} {rng.randint(1, 9999)}"}
        case "search":
            thing_there = (topic(rng), made_up_word(rng), f"{rng.choice(THINGS)} in {rng.choice(CITIES)}")
            return {"query": rng.choice(thing_there)}
        case "send_message":
            to, thing = rng.choice(FIRST_NAMES), rng.choice(THINGS)
            return {"to": to, "text": rng.choice([*TEXTS["messages"], f"Bring the {thing}"])}
        case "set_reminder":
            text = f"{pick(rng, 'chores')} the {rng.choice(THINGS)}"
            return {"text": text, "day": pick(rng, "weekdays")}
        case "book_table":
            return {"people": rng.randint(2, 12), "day": pick(rng, "weekdays")}
        case _:
            return {"item": rng.choice(THINGS)}


def _result(rng: Random, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match tool:
        case "get_weather":
            return {"sky": pick(rng, "skies"), "degrees": rng.randint(-5, 35)}
        case "get_time":
            return {"time": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"}
        case "calculate":
            left, sign, right = arguments["expression"].split()
            return {"value": _OPERATIONS[sign](int(left), int(right))}
        case "search":
            return {"count": rng.randint(1, 500)}
        case "get_stock":
            return {"count": rng.randint(0, 300)}
        case _:
            return {"status": {"send_message": "sent", "set_reminder": "ok", "book_table": "booked"}[tool]}


def _schema(tool: str) -> dict[str, Any]:
    """Return a tool as an OpenAI chat completion request declares it."""
    about, kinds = _TOOLS[tool]["about"], _TOOLS[tool]["parameters"]
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    function = {"name": tool, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def _offered(rng: Random, wanted: str) -> tuple[dict[str, Any], ...]:
    """Return the wanted tool among up to two others."""
    shown = [wanted, *rng.sample([tool for tool in _TOOLS if tool != wanted], rng.randint(0, 2))]
    rng.shuffle(shown)
    return tuple(_schema(tool) for tool in shown)


def _system(rng: Random) -> tuple[Message, ...]:
    return (Message("system", pick(rng, "system_prompts")),) if rng.random() < 0.4 else ()


def call_text(call: ToolCall) -> str:
    """Return a call as text, in the format of the Hermes models."""
    shown = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{shown}\n</tool_call>"


def call_tool(rng: Random) -> Dialogue:
    tool = rng.choice(list(_TOOLS))
    arguments = _arguments(rng, tool)
    call = ToolCall(tool, arguments)
    system = _system(rng)
    asked = Message("user", rng.choice(_TOOLS[tool]["asks"]).format(**arguments))
    messages = (*system, asked, Message("assistant", "", (call,)))
    return Dialogue(messages, _offered(rng, tool))


def use_result(rng: Random) -> Dialogue:
    tool = rng.choice(list(_TOOLS))
    arguments = _arguments(rng, tool)
    result = _result(rng, tool, arguments)
    reply = _TOOLS[tool]["reply"].format(**arguments, **result)
    system = _system(rng)
    asked = Message("user", rng.choice(_TOOLS[tool]["asks"]).format(**arguments))
    call = Message("assistant", "", (ToolCall(tool, arguments),))
    messages = (*system, asked, call, Message("tool", json.dumps(result)), Message("assistant", reply))
    return Dialogue(messages, _offered(rng, tool))


def no_tool_needed(rng: Random) -> Dialogue:
    plain = rng.choice((capital, greeting, about_the_assistant))(rng)
    messages = (*_system(rng), *plain.messages)
    return Dialogue(messages, _offered(rng, rng.choice(list(_TOOLS))))
