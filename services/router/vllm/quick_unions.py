"""Validate request bodies at a low cost per list item, whether the item is valid or not.

pydantic tries every member of a union, and every item of a list: 1,000 invalid items of `/v1/responses` took
1.8 s and 900 MiB. But nearly all members fix their `type` or `role` by a literal. So an item is tried only
with the members that could accept it (2 to 20 us), and a list stops at its first bad item. The same bodies
are accepted with the same results.

Leans on: the request models of vLLM's routes (`REQUESTS`), BaseModel.{__pydantic_core_schema__,
__pydantic_validator__, __pydantic_complete__}, the core schemas of pydantic_core (union, tagged-union with a
callable, list with fail_fast, typed-dict, model, literal, definitions), and FastAPI, whose routes take a
model's core schema when they are included in an app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import SchemaValidator
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

REQUESTS: tuple[type[BaseModel], ...] = (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerativeScoringRequest,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
KEYS = ("type", "role")  # fields that identify the members of a union
FEW = 3  # unions with at most this many members or tags stay as they are
_ANY = "another or none"  # tag of an item without the field, or with an unknown value
_LISTS = frozenset({"list", "tuple", "set", "frozenset"})

Schema = dict[str, Any]


def quicken_requests() -> None:
    """Speed up all request models. Call it before vLLM's app is built; a second call does nothing."""
    for model in REQUESTS:
        quicken(model)


def quicken(model: type[BaseModel]) -> None:
    if "baton_quick" in vars(model):
        return
    schema = quick(model.__pydantic_core_schema__)
    model.__pydantic_core_schema__ = schema
    model.__pydantic_validator__ = SchemaValidator(schema, None)
    model.baton_quick = True  # type: ignore[attr-defined]


def quick(schema: Any) -> Any:
    """Return an equivalent core schema with faster unions and lists."""
    return _Quick(schema).rebuilt(schema)


class _Quick:
    """Rebuilds one schema, whose definitions resolve its references."""

    def __init__(self, schema: Any) -> None:
        self._definitions = {one["ref"]: one for one in _with_ref(schema)}

    def rebuilt(self, node: Any) -> Any:
        """Return a copy of a part of the schema; classes, functions and so on stay the same objects."""
        if isinstance(node, list | tuple):
            return type(node)(self.rebuilt(one) for one in node)
        if not isinstance(node, dict):
            return node
        kind = node.get("type")
        if not isinstance(kind, str):  # a mapping of fields, one of which may be called `type`
            return {name: self.rebuilt(one) for name, one in node.items()}
        if kind == "literal":
            return node
        kept = {
            name: one if name in ("default", "metadata") else self.rebuilt(one) for name, one in node.items()
        }
        if kind in _LISTS:
            return {**kept, "fail_fast": True}
        return self._tagged(node, kept) if kind == "union" else kept

    def _tagged(self, union: Schema, rebuilt: Schema) -> Schema:
        """Return a union that chooses the members to try by one field."""
        members = list(zip(_members(union), rebuilt["choices"], strict=True))
        if len(members) <= FEW:
            return rebuilt
        named = {key: [self._names(one, key) for one, _ in members] for key in KEYS}
        key = max(KEYS, key=lambda each: sum(names is not None for names in named[each]))
        tags = {name for names in named[key] if names for name in names} | {_ANY}
        if len(tags) <= FEW:
            return rebuilt
        choices = {}
        for tag in tags:
            fit = [
                new
                for names, (_, new) in zip(named[key], members, strict=True)
                if names is None or tag in names
            ]
            if fit:
                choices[tag] = {**rebuilt, "choices": fit}
        known = ", ".join(sorted(tags - {_ANY}))
        return {
            "type": "tagged-union",
            "choices": choices,
            "discriminator": _tagger(key, frozenset(tags)),
            "custom_error_type": "unknown_kind",
            "custom_error_message": f"needs to be an object whose '{key}' is one of: {known}",
            **{name: rebuilt[name] for name in ("ref", "metadata", "serialization") if name in rebuilt},
        }

    def _names(self, member: Schema, key: str) -> frozenset[str] | None:
        """Return which values of `key` the member accepts; None if unknown.

        `_ANY` stands for an absent or null field.
        """
        kind = member["type"]
        if kind == "definition-ref":
            return self._names(self._definitions[member["schema_ref"]], key)
        if kind in ("union", "tagged-union"):
            return _united(self._names(one, key) for one in _members(member))
        if kind == "model" and not member.get("root_model"):
            return self._names(member["schema"], key)
        field = member["fields"].get(key) if kind in ("typed-dict", "model-fields") else None
        if field is None or field.get("validation_alias") is not None:
            return None
        required = field.get("required", kind == "model-fields")
        names = self._literals(field["schema"])
        return names if required or names is None else names | {_ANY}

    def _literals(self, schema: Schema) -> frozenset[str] | None:
        kind = schema["type"]
        if kind == "literal" and all(isinstance(one, str) for one in schema["expected"]):
            return frozenset(schema["expected"])
        if kind in ("default", "nullable"):
            inner = self._literals(schema["schema"])
            return None if inner is None else inner | {_ANY}
        return None


def _with_ref(node: Any) -> Iterator[Schema]:
    """Yield all schemas that other schemas can refer to."""
    if isinstance(node, dict):
        if isinstance(node.get("ref"), str) and isinstance(node.get("type"), str):
            yield node
        for name, one in node.items():
            if name not in ("default", "metadata"):
                yield from _with_ref(one)
    elif isinstance(node, list | tuple):
        for one in node:
            yield from _with_ref(one)


def _members(union: Schema) -> list[Schema]:
    choices = union["choices"]
    if isinstance(choices, dict):
        return list(choices.values())
    return [one[0] if isinstance(one, tuple) else one for one in choices]


def _united(several: Iterator[frozenset[str] | None]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset()
    for names in several:
        if names is None:
            return None
        found |= names
    return found


def _tagger(key: str, tags: frozenset[str]) -> Callable[[Any], str]:
    def tag(item: Any) -> str:
        """Return the tag whose members are tried. Called for each item of a list."""
        name = item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)
        return name if isinstance(name, str) and name in tags else _ANY

    return tag
