"""Faster unions give the same results, and a list of wrong items costs only one."""

import itertools
import time
from typing import Annotated, Literal, NotRequired, Required

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator
from typing_extensions import TypedDict
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses import api_router as responses_routes
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMError

from baton.services.router.vllm.quick_unions import REQUESTS, quick, quicken_requests
from tests.fuzz.shapes import ITEMS, RIGHT

NEW_EACH_TIME = ("id", "request_id")
PLAIN = {model: SchemaValidator(model.__pydantic_core_schema__) for model in REQUESTS}
MORE = (
    {"type": None, "id": "x"},
    {"id": "x"},
    {"type": "item_reference", "id": "x"},
    {"type": "nothing", "role": "user", "content": "a"},
    {"role": "developer", "content": "a"},
    {"role": "critic", "content": "a"},
    {"role": "function", "name": "f", "content": "a"},
    {"role": ["user"], "content": "a"},
    {"type": {}, "role": "assistant", "content": "a"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "a"}},
    {"type": "custom", "name": "f"},
    {"type": "web_search"},
    {"type": "mcp", "server_label": "a", "server_url": "b"},
)


@pytest.fixture(scope="module", autouse=True)
def quickened():
    quicken_requests()
    quicken_requests()


def outcome(validator, body, refusals=(ValidationError, ValueError, TypeError, AttributeError, VLLMError)):
    """Return a validator's result for a body, or "refused" if it raises one of `refusals`."""
    try:
        return plain(validator.validate_python(body))
    except refusals:
        return "refused"


def plain(value):
    """Return a value in plain types, which also runs pydantic's lazy validators."""
    if isinstance(value, BaseModel):
        return type(value).__name__, plain(dict(value))
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in NEW_EACH_TIME}
    if isinstance(value, list | tuple) or type(value).__name__ == "ValidatorIterator":
        return [plain(one) for one in value]
    return value


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_each_item_gets_the_same_result(model):
    rights = [{"model": "m", **right} for right in RIGHT.values()]
    right = next(one for one in rights if outcome(PLAIN[model], one) != "refused")
    fields = [name for name in ("messages", "input", "tools", "items") if name in model.model_fields]
    compared = 0
    for field, item in itertools.product(fields, (*ITEMS, *MORE)):
        for value in ([item], [item, item], [{"role": "user", "content": [item]}], [[item]], item):
            body = {**right, field: value, "request_id": "r"}
            usual, quickened = PLAIN[model], model.__pydantic_validator__
            assert outcome(quickened, dict(body)) == outcome(usual, dict(body)), body
            compared += 1
    assert compared or not fields


def test_wrong_items_cost_one_item():
    for model, field in ((ResponsesRequest, "input"), (ChatCompletionRequest, "messages")):
        for item in ({}, 0):
            began = time.thread_time()
            with pytest.raises(ValidationError) as refused:
                model.model_validate({"model": "m", field: [item] * 5_000})
            assert refused.value.error_count() < 30  # 5,000 times `{}` make over a million without this
            assert time.thread_time() - began < 1.0  # 2 ms of a core; over 10 s without this


async def test_routes_of_a_new_app_validate_quickly():
    app = FastAPI()
    for routes in (responses_routes, chat_routes):
        routes.attach_router(app)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for path, field in (("/v1/responses", "input"), ("/v1/chat/completions", "messages")):
            refused = await client.post(path, json={"model": "m", field: [{}] * 100})
            assert refused.status_code == 422
            assert len(refused.json()["detail"]) < 30


class One(TypedDict, total=False):
    type: Required[Literal["one"]]
    a: int


class Two(TypedDict):
    type: Literal["two", "deux"]
    b: str


class Maybe(TypedDict):
    type: NotRequired[Literal["maybe"]]
    c: str


class Three(BaseModel):
    type: Literal["three"] = "three"
    d: int


class Other(TypedDict):
    kind: str


@pytest.mark.parametrize(
    "value",
    [
        {"type": "one", "a": 1},
        {"type": "one", "b": "x"},
        {"type": "deux", "b": "x"},
        {"type": "maybe", "c": "x"},
        {"c": "x"},
        {"d": 3},
        {"type": "three", "d": 3},
        Three(d=3),
        {"type": "none", "kind": "x"},
        {"kind": "x", "type": 3},
        {},
        7,
        None,
        "one",
    ],
)
def test_members_without_a_literal_are_always_tried(value):
    adapter = TypeAdapter(Annotated[list[One | Two | Maybe | Three | Other], Field(max_length=3)])
    usual, quickened = adapter.validator, SchemaValidator(quick(adapter.core_schema))
    assert quick(adapter.core_schema)["items_schema"]["type"] == "tagged-union"
    assert outcome(quickened, [value], ValidationError) == outcome(usual, [value], ValidationError)
