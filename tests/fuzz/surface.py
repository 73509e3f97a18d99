"""Requests that schemathesis generates from the router's own OpenAPI document."""

import importlib
import json
import pkgutil

import httpx
import schemathesis
import schemathesis.generation
import schemathesis.python
import schemathesis.transport
from hypothesis import strategies as st

from harness.deployment import MODEL_NAME
from harness.support import CALL_S
from tests.fuzz.shapes import RIGHT

LENGTHS = ("max_tokens", "max_output_tokens")
SENT = 4  # most bodies sent per generated one, which can take a second to generate
RARELY = 2  # one in this many generated bodies is also sent as it is, except for the answer's length
UNAVAILABLE = (503, 504)  # allowed: no room, and our own deadline
TIMEOUT_S = "6"  # of a request; some ask for thousands of tokens

# Schemathesis would import half of itself during the first examples, and pytest rewrites those modules.
# CPython 3.11's ast.parse is not re-entrant (gh-106905): it raises if a finalizer parses something at the
# same time.
for package in (schemathesis.generation, schemathesis.python, schemathesis.transport):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def operations(url):
    """Return the operations (paths and methods) that the router offers.

    The alternatives of a message overlap. With `oneOf`, hardly any generated message is valid.
    """
    document = httpx.get(f"{url}/openapi.json", timeout=CALL_S).text
    schema = schemathesis.openapi.from_dict(json.loads(document.replace('"oneOf"', '"anyOf"')))
    return [found.ok() for found in schema.get_all_operations()]


@st.composite
def requests(draw, operation):
    """Generate a case and its bodies: valid ones with a few generated fields each."""
    case = draw(operation.as_strategy())
    body = case.body
    right = RIGHT.get(operation.path)
    if right is None or not isinstance(body, dict):
        return case, [body]
    bodies = []
    if not draw(st.integers(0, RARELY - 1)):
        bodies.append({**{name: value for name, value in right.items() if name in LENGTHS}, **body})
    fields = draw(st.permutations(sorted(body)))
    while len(bodies) < SENT:
        few, fields = fields[: draw(st.integers(1, 3))], fields[3:]
        bodies.append({"model": MODEL_NAME, **right, **{name: body[name] for name in few}})
        if not fields:
            break  # further ones would have no generated field
    return case, bodies


def send(http, case, body):
    """Return the complete answer, or None if the request cannot be expressed in HTTP."""
    wanted = case.as_transport_kwargs(base_url=str(http.base_url))
    headers = {**dict(wanted.get("headers") or {}), "X-Request-Timeout": TIMEOUT_S}
    content = {"json": body} if isinstance(body, dict | list) else {"content": wanted.get("data")}
    try:
        return http.request(
            wanted["method"], wanted["url"], params=wanted.get("params"), headers=headers, **content
        )
    except (httpx.InvalidURL, UnicodeEncodeError, ValueError, TypeError):
        return None
