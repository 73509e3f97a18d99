"""Calls of given tools, their results, and questions that need none of the tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .base import SYSTEM_PROMPTS, Dialogue, Message, ToolCall, generator
from .facts import capital
from .lexicon import CITIES, FIRST_NAMES, THINGS, WEEKDAYS, made_up_word, topic
from .smalltalk import about_the_assistant, greeting


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool: its parameters by JSON type, what a user may ask, and how a result is told.

    `draw` makes the arguments; `result` makes what the tool returns for them.
    """

    name: str
    description: str
    parameters: dict[str, str]
    asks: tuple[str, ...]
    reply: str
    draw: Callable[[Random], dict[str, Any]]
    result: Callable[[Random, dict[str, Any]], dict[str, Any]]

    def schema(self, name: str) -> dict[str, Any]:
        """Return the tool as an OpenAI chat completion request declares it."""
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {
            "type": "function",
            "function": {"name": name, "description": self.description, "parameters": parameters},
        }


_TOOLS = (
    ToolSpec(
        "get_weather",
        "Get the current weather for a city.",
        {"city": "string"},
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "Is it warm in {city}?",
            "What's the weather like in {city} today?",
            "Weather in {city}",
        ),
        "The weather in {city} is {sky} with {degrees} degrees.",
        lambda rng: {"city": rng.choice(CITIES)},
        lambda rng, _: {
            "sky": rng.choice(("sunny", "cloudy", "rainy", "windy", "clear")),
            "degrees": rng.randint(-5, 35),
        },
    ),
    ToolSpec(
        "get_time",
        "Get the local time of a city.",
        {"city": "string"},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
        "It is {time} in {city}.",
        lambda rng: {"city": rng.choice(CITIES)},
        lambda rng, _: {"time": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"},
    ),
    ToolSpec(
        "calculate",
        "Evaluate an arithmetic expression.",
        {"expression": "string"},
        (
            "Use the tool to calculate {expression}.",
            "What is {expression}?",
            "Calculate {expression}",
            "Please compute {expression}.",
        ),
        "{expression} = {value}",
        lambda rng: {"expression": f"{rng.randint(1, 9999)} {rng.choice('+-*')} {rng.randint(1, 9999)}"},
        lambda _, arguments: {"value": _evaluate(arguments["expression"])},
    ),
    ToolSpec(
        "search",
        "Search the web.",
        {"query": "string"},
        (
            "Search for {query}.",
            "Find something about {query}.",
            "Look up {query} on the web.",
            "Please search the web for {query}.",
        ),
        "I found {count} pages about {query}.",
        lambda rng: {
            "query": rng.choice(
                (topic(rng), made_up_word(rng), f"{rng.choice(THINGS)} in {rng.choice(CITIES)}")
            )
        },
        lambda rng, _: {"count": rng.randint(1, 500)},
    ),
    ToolSpec(
        "send_message",
        "Send a message to a person.",
        {"to": "string", "text": "string"},
        ('Send "{text}" to {to}.', 'Tell {to}: "{text}"', 'Write a message to {to} that says "{text}".'),
        "I sent your message to {to}.",
        lambda rng: {
            "to": rng.choice(FIRST_NAMES),
            "text": rng.choice(
                (
                    "I am late",
                    "See you soon",
                    "Happy birthday",
                    "The report is ready",
                    "Call me back",
                    f"Bring the {rng.choice(THINGS)}",
                )
            ),
        },
        lambda _, __: {"status": "sent"},
    ),
    ToolSpec(
        "set_reminder",
        "Set a reminder.",
        {"text": "string", "day": "string"},
        (
            "Remind me on {day} to {text}.",
            "Set a reminder for {day}: {text}",
            "I need a reminder to {text} on {day}.",
        ),
        "I will remind you on {day} to {text}.",
        lambda rng: {
            "text": f"{rng.choice(('buy', 'fix', 'clean', 'find', 'return'))} the {rng.choice(THINGS)}",
            "day": rng.choice(WEEKDAYS),
        },
        lambda _, __: {"status": "ok"},
    ),
    ToolSpec(
        "book_table",
        "Book a table in a restaurant.",
        {"people": "integer", "day": "string"},
        (
            "Book a table for {people} people on {day}.",
            "I need a table on {day} for {people} people.",
            "Reserve a table for {people} on {day}.",
        ),
        "Your table for {people} people on {day} is booked.",
        lambda rng: {"people": rng.randint(2, 12), "day": rng.choice(WEEKDAYS)},
        lambda _, __: {"status": "booked"},
    ),
    ToolSpec(
        "get_stock",
        "Get how many of an item are in stock.",
        {"item": "string"},
        ("How many {item}s are in stock?", "Check the stock of {item}.", "Do we have any {item} left?"),
        "There are {count} of {item} in stock.",
        lambda rng: {"item": rng.choice(THINGS)},
        lambda rng, _: {"count": rng.randint(0, 300)},
    ),
)


def _evaluate(expression: str) -> int:
    left, operator, right = expression.split()
    operations: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return operations[operator](int(left), int(right))


def _offered(rng: Random, wanted: ToolSpec) -> tuple[dict[str, Any], ...]:
    """Return the wanted tool among up to two others."""
    others = [tool for tool in _TOOLS if tool is not wanted]
    shown = [wanted, *rng.sample(others, rng.randint(0, 2))]
    rng.shuffle(shown)
    return tuple(tool.schema(tool.name) for tool in shown)


def _system(rng: Random) -> tuple[Message, ...]:
    return (Message("system", rng.choice(SYSTEM_PROMPTS)),) if rng.random() < 0.4 else ()


def call_text(call: ToolCall) -> str:
    """Return a call as a reply has it, in the format of the Hermes models."""
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n</tool_call>"


@generator("tools", 4.0)
def call_tool(rng: Random) -> Dialogue:
    spec = rng.choice(_TOOLS)
    arguments = spec.draw(rng)
    call = ToolCall(spec.name, arguments)
    messages = (
        *_system(rng),
        Message("user", rng.choice(spec.asks).format(**arguments)),
        Message("assistant", "", (call,)),
    )
    return Dialogue(messages, _offered(rng, spec), answer=call_text(call))


@generator("tools", 4.0)
def use_result(rng: Random) -> Dialogue:
    spec = rng.choice(_TOOLS)
    arguments = spec.draw(rng)
    result = spec.result(rng, arguments)
    reply = spec.reply.format(**arguments, **result)
    messages = (
        *_system(rng),
        Message("user", rng.choice(spec.asks).format(**arguments)),
        Message("assistant", "", (ToolCall(spec.name, arguments),)),
        Message("tool", json.dumps(result)),
        Message("assistant", reply),
    )
    return Dialogue(messages, _offered(rng, spec), answer=reply)


@generator("tools", 2.0)
def no_tool_needed(rng: Random) -> Dialogue:
    plain = rng.choice((capital, greeting, about_the_assistant))(rng)
    return Dialogue((*_system(rng), *plain.messages), _offered(rng, rng.choice(_TOOLS)), answer=plain.answer)
