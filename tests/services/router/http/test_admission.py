import asyncio
import json
import logging
import sys

import pytest
from prometheus_client import CollectorRegistry

from baton.services import logs
from baton.services.router.chronicle import Chronicle
from baton.services.router.errors import NotAdmitted, RequestFailed, Why
from baton.services.router.http.admission import AdmissionMiddleware, _party, current_admission
from baton.services.router.metrics import RouterMetrics
from baton.services.router.tenancy import Tenancy
from baton.services.tenants.model import ANYBODY
from baton.services.tenants.quotas import Quotas


async def admit(app, *headers):
    """Return what a client gets from an app behind admission."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    metrics = RouterMetrics(CollectorRegistry())
    tenancy = Tenancy(Quotas(None, "r1"), metrics)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": list(headers)}
    await asyncio.create_task(AdmissionMiddleware(app, tenancy, Chronicle(metrics))(scope, receive, send))
    return sent


async def respond(*messages, error, at=0):
    """Return what a client gets if an app sends `messages` and fails before the one at `at`."""

    async def app(scope, receive, send):
        for index, message in enumerate(messages):
            if index == at:
                current_admission.get().refuse(error)
            await send(message)

    return await admit(app)


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "0af7651916cd43dd8448eb211c80319c"),
        (b"00-00000000000000000000000000000000-b7ad6b7169203331-01", None),  # invalid: a new trace begins
        (b"anything", None),
    ],
)
async def test_log_lines_of_a_request_have_its_trace(header, trace, capsys):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logs.formatter("json", "router"))
    log = logging.Logger("apart")
    log.addHandler(handler)

    async def app(scope, receive, send):
        log.warning("here")

    assert await admit(app, (b"traceparent", header)) == []
    told = json.loads(capsys.readouterr().err)["trace_id"]
    assert told == trace if trace else len(told) == 32 and told != "0" * 32


START = {"type": "http.response.start", "status": 200, "headers": []}
CHUNK = {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


async def test_after_the_first_chunk_the_response_continues():
    whole = [START, CHUNK, CHUNK, END]
    assert await respond(*whole, error=RequestFailed("x"), at=2) == whole


async def test_a_request_that_never_fits_is_400():
    start, _ = await respond(START, CHUNK, error=NotAdmitted("too large", Why.TOO_LARGE))
    assert start["status"] == 400
    assert all(name != b"retry-after" for name, _ in start["headers"])


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer c4nary"},
        {"x-api-key": "c4nary"},
        {"x-api-key": " c4nary", "authorization": "BEARER c4nary"},
    ],
    ids=str,
)
def test_a_key_is_one_party_in_the_queue(headers):
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    party = _party(ANYBODY, {"headers": raw, "client": ("10.0.0.1", 5)})
    assert party == _party(ANYBODY, {"headers": [(b"x-api-key", b"c4nary")], "client": ("10.0.0.2", 6)})
    for others in ([(b"x-api-key", b"other")], []):
        assert party != _party(ANYBODY, {"headers": others, "client": ("10.0.0.1", 5)})
