"""Badly behaved clients: they do not read, set short deadlines, or send impossible grammars."""

import json
import socket
import time
from contextlib import ExitStack

import httpx
import psutil
import pytest

from harness.deployment import MODEL_NAME, free_blocks, idle
from harness.support import CALL_S, PATIENCE, eventually, listener
from tests.e2e.conftest import SLOW_CLIENT_S

READERS = 4
LONG = {"prompt": "Hi", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def http(one_pair):
    with httpx.Client(base_url=one_pair.url, timeout=CALL_S) as client:
        yield client


def ask(http, max_tokens=32):
    body = {"model": MODEL_NAME, "prompt": "Hello", "max_tokens": max_tokens, "temperature": 0}
    answer = http.post("/v1/completions", json=body).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def connected(router, ports):
    """Return whether the router has a connection to one of the clients at these ports."""
    connections = router.net_connections("tcp")
    return any(one.status == psutil.CONN_ESTABLISHED and one.raddr.port in ports for one in connections)


def deaf(pair):
    """Connect a client that requests a long stream of large events and never reads."""
    body = json.dumps({"model": MODEL_NAME, **LONG, "logprobs": 3, "return_token_ids": True}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", pair.port))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    return client


def test_a_client_that_does_not_read_holds_nothing(one_pair, http):
    right = ask(http)
    eventually(lambda: idle(one_pair), 10, "the deployment is idle")
    router = listener(one_pair.port)
    blocks, rss = free_blocks(one_pair), router.memory_info().rss
    with ExitStack() as clients:
        deaf_ones = [clients.enter_context(deaf(one_pair)) for _ in range(READERS)]
        ports = {client.getsockname()[1] for client in deaf_ones}
        eventually(lambda: not idle(one_pair), 10, "they run")
        assert [ask(http) for _ in range(3)] == [right] * 3  # others are served
        eventually(lambda: idle(one_pair) and free_blocks(one_pair) == blocks, 60, "all blocks are free")
        eventually(lambda: not connected(router, ports), SLOW_CLIENT_S + 20, "the router has disconnected")
    assert ask(http) == right
    assert router.memory_info().rss - rss < 64 << 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_says_how_long_it_waits(one_pair, http, stream):
    ask(http)
    eventually(lambda: idle(one_pair), 10, "the deployment is idle")
    blocks = free_blocks(one_pair)
    body = {"model": MODEL_NAME, **LONG, "n": 8, "temperature": 1, "stream": stream}
    began = time.monotonic()
    got = http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.5"})
    assert time.monotonic() - began < 5 * PATIENCE
    if stream and got.status_code == 200:  # the first token came in time
        *_, error, done = [line for line in got.text.splitlines() if line]
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504
    else:
        assert (got.status_code, got.json()["error"]["type"]) == (504, "GatewayTimeoutError")
    eventually(lambda: idle(one_pair) and free_blocks(one_pair) == blocks, 5, "the request has ended")


def _chain(length):
    """Return a schema that only guidance supports, with references that overflow its parser's stack."""
    links = {
        f"d{n}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["n"]}
        for n in range(length)
    }
    links[f"d{length}"] = {"type": "integer", "multipleOf": 3}
    return {"$ref": "#/$defs/d0", "$defs": links}


def _tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def _format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _response(schema):
    return {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}


SAY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
NOTHING = {"$ref": "#"}
LARGE = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(6000)}}
GRAMMARS = {
    "a grammar": ("completions", {"prompt": "Hi", "structured_outputs": {"grammar": "root ::= root"}}),
    "a regex": (
        "completions",
        {"prompt": "Hi", "structured_outputs": {"regex": "[^\\s\\S]"}, "stream": True},
    ),
    "choices that are not allowed": (
        "completions",
        {"prompt": "Hi", "structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [300]},
    ),
    "a schema": ("chat/completions", {**SAY, "response_format": _format(NOTHING)}),
    "a schema that ends its compiler": (
        "chat/completions",
        {**SAY, "response_format": _format(_chain(1200))},
    ),
    "large tools": ("chat/completions", {**SAY, "tools": [_tool(LARGE)], "tool_choice": "required"}),
    "a tool that ends its compiler": (
        "chat/completions",
        {
            **SAY,
            "tools": [_tool(_chain(1200))],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "text.format": ("responses", _response(NOTHING)),
    "a large text.format": ("responses", _response(LARGE)),
}


def test_a_grammar_that_cannot_be_served_is_400_and_costs_no_worker(one_pair, http):
    right = ask(http)
    router = listener(one_pair.port)
    rss = router.memory_info().rss
    wrong = []
    for name, (path, body) in GRAMMARS.items():
        answer = http.post(f"/v1/{path}", json={"model": MODEL_NAME, **body})
        if answer.status_code != 400 or not answer.json()["error"]["message"]:
            wrong.append(f"{name}: {answer.status_code} {answer.text[:300]}")
    assert not wrong
    assert ask(http) == right
    assert router.memory_info().rss - rss < 64 << 20
    eventually(lambda: idle(one_pair), 10, "the deployment is idle")
