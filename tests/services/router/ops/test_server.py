import json
import logging

import httpx
import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.config import SchedulerSettings
from baton.services.overview.commands import ActionRefused
from baton.services.overview.workers import COLUMNS
from baton.services.router.ops.access import COOKIE
from baton.services.router.ops.server import Action, Actions
from harness.live_page import live_page
from harness.scheduling import until
from tests.services.router.ops.records import record

ACT = {"x-baton-ops": "1"}
RIGHTS = "use `baton drain`"  # what a router without an operator's rights says


async def messages(client, number):
    found = []
    async with client.stream("GET", "/ops/feed") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == number:
                return found
    raise AssertionError("the feed ended")


async def test_the_feed_shows_what_the_scheduler_knows():
    async with live_page() as page, httpx.AsyncClient(base_url=page.url) as client:
        await page.register(("p", pb.ROLE_PREFILL), ("d", pb.ROLE_DECODE))
        first = (await client.get("/ops/first")).json()
        assert first["columns"] == list(COLUMNS)

        async def both():
            return len((await messages(client, 2))[-1]["workers"]) == 2

        await until(both)
        last = (await messages(client, 2))[-1]
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in last["workers"]]
        found = sorted((row["id"], row["role"], row["state"]) for row in rows)
        assert found == [("d", "decode", "ready"), ("p", "prefill", "ready")]
        assert any("registered" in text for *_, text in last["events"])


async def test_the_page_loads_nothing_from_elsewhere():
    async with live_page() as page, httpx.AsyncClient(base_url=page.url) as client:
        whole = await client.get("/ops")
        assert whole.status_code == 200
        for path in ("/ops", "/ops/first", "/ops/requests"):  # another site's name for this machine
            assert (await client.get(path, headers={"host": "evil.example"})).status_code == 421
        assert "default-src 'self'" in whole.headers["content-security-policy"]
        for path in ("main.js", "fleet.js", "ops.css", "vendor/preact-htm.js", "vendor/uplot.js"):
            found = await client.get(f"/ops/static/{path}")
            assert found.status_code == 200
            assert "https://" not in found.text.replace("https://github.com/leeoniya/uPlot", "")


async def test_requests_are_listed_and_found():
    async with live_page() as page, httpx.AsyncClient(base_url=page.url) as client:
        page.recent.add(record("one", workers=("p", "decode-7"), moved=1024))
        page.recent.add(record("two", outcome="error", troubles=("lost",)))
        listed = (await client.get("/ops/requests", params={"n": 10})).json()
        assert [row["request_id"] for row in listed] == ["two", "one"]
        found = (await client.get("/ops/requests", params={"search": "decode-7"})).json()
        assert [row["request_id"] for row in found] == ["one"]
        one = (await client.get("/ops/requests/cmpl-two")).json()
        assert (one["outcome"], len(one["attempts"])) == ("error", 2)
        assert one["events"][0]["attributes"]["trouble"] == "lost"
        assert (await client.get("/ops/requests/nobody")).status_code == 404


async def test_an_operator_drains_and_undrains_and_both_are_logged(caplog):
    caplog.set_level(logging.INFO, "baton")  # other tests' imports leave the root at ERROR
    async with live_page() as page, httpx.AsyncClient(base_url=page.url, headers=ACT) as client:
        await page.register(("d-1", pb.ROLE_DECODE))
        action = {"action": "drain", "worker": "d-1", "confirm": "d-1"}
        assert (await client.post("/ops/actions", json=action)).json() == {"done": "d-1 is draining"}
        assert (await page.scheduler.describe()).drained == ["d-1"]
        back = await client.post("/ops/actions", json=action | {"action": "undrain"})
        assert back.json() == {"done": "d-1 takes requests again"}
        assert not (await page.scheduler.describe()).drained
        told = [text for *_, text in page.feed.events.after(0) if "asked by 127.0.0.1" in text]
        assert len(told) == 2
        assert [one.name for one in caplog.records if one.name == "baton.audit"]


async def test_an_action_goes_to_the_models_scheduler_that_has_the_worker():
    other = SchedulerServer(SchedulerSettings(address="127.0.0.1:0", topic="other"))
    async with live_page() as page, other as server, SchedulerClient(server.address) as client:
        actions = Actions([page.scheduler, client], page.feed.events)
        action = Action(action="drain", worker="d-1", confirm="d-1")
        with pytest.raises(ActionRefused, match="d-1"):
            await actions.run(action, "somebody")
        await page.register(("d-1", pb.ROLE_DECODE))
        assert await actions.run(action, "somebody") == "d-1 is draining"
        assert (await page.scheduler.describe()).drained == ["d-1"]


@pytest.mark.parametrize(
    ("changes", "headers", "status", "said"),
    [
        ({"confirm": "d-2"}, ACT, 409, "not confirmed"),
        ({}, {}, 403, "X-Baton-Ops"),
        ({"worker": "nobody", "confirm": "nobody"}, ACT, 409, "nobody"),
        ({"action": "role", "role": "king"}, ACT, 409, "king"),
        ({"action": "kill"}, ACT, 422, "drain"),
        ({"more": 1}, ACT, 422, "more"),
        ({}, ACT, 409, RIGHTS),
    ],
)
async def test_doubtful_actions_are_refused(changes, headers, status, said):
    forbidden = said if said == RIGHTS else ""
    async with live_page("", forbidden) as page, httpx.AsyncClient(base_url=page.url) as client:
        await page.register(("d-1", pb.ROLE_DECODE))
        action = {"action": "drain", "worker": "d-1", "confirm": "d-1"} | changes
        response = await client.post("/ops/actions", json=action, headers=headers)
        assert response.status_code == status
        assert said == response.json()["error"]["message"] if forbidden else said in response.text
        assert not (await page.scheduler.describe()).drained


async def test_a_key_is_asked_for_once():
    async with live_page(key="secret") as page, httpx.AsyncClient(base_url=page.url) as client:
        for path in ("/ops/first", "/ops/feed", "/ops/requests"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/ops/actions", json={}, headers=ACT)).status_code == 401
        assert (await client.get("/ops")).headers["location"] == "/ops/login"
        assert (await client.get("/ops/login")).status_code == 200
        wrong = await client.post("/ops/login", data={"key": "guess"})
        assert wrong.headers["location"] == "/ops/login?wrong"
        right = await client.post("/ops/login", data={"key": "secret"})
        assert right.headers["location"] == "/ops"
        assert "HttpOnly" in right.headers["set-cookie"]
        assert client.cookies[COOKIE] != "secret"
        assert (await client.get("/ops/first")).status_code == 200
        async with httpx.AsyncClient(base_url=page.url, headers={"authorization": "Bearer secret"}) as other:
            assert (await other.get("/ops/first")).status_code == 200
