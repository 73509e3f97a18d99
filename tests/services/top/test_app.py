import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
from textual.widgets import DataTable, Static

from baton.autoscale.histogram import SECONDS, Histogram
from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.top.app import Top
from harness.fake_worker import FakeWorker
from harness.scheduling import Options, identity
from harness.support import PATIENCE

REFRESH_S = 0.1


class Flipping(FakeWorker):
    """A fake worker that changes its role like a real one: it registers again."""

    async def SetRole(self, request, _context):
        self.role = request.role
        await self.client.register(self.identity, pb.WORKER_STATE_READY)
        return worker_pb2.SetRoleReply()


@asynccontextmanager
async def site():
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(SchedulerServer(Options(worker_lease_s=600.0)))
        client = await stack.enter_async_context(SchedulerClient(server.address, router_id="router-1"))
        workers = [Flipping("prefill-0", pb.ROLE_PREFILL), Flipping("decode-0", pb.ROLE_DECODE)]
        for worker in workers:
            await stack.enter_async_context(worker)
            worker.client = client
            await client.register(worker.identity, pb.WORKER_STATE_READY)
            load = pb.WorkerLoad(running=3, free_blocks=worker.capacity.num_blocks // 2)
            await client.heartbeat(worker.worker_id, pb.WORKER_STATE_READY, load)
        yield SimpleNamespace(address=server.address, client=client, workers=workers)


@asynccontextmanager
async def shown(address, width=80, refresh_s=REFRESH_S):
    async with Top({"": address}, refresh_s).run_test(size=(width, 24)) as pilot:
        yield pilot


async def until(pilot, what, condition):
    for _ in range(round(200 * PATIENCE)):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"{what}; the screen:\n{screen(pilot)}")


def screen(pilot):
    return "\n".join(
        "".join(segment.text for segment in strip) for strip in pilot.app.screen._compositor.render_strips()
    )


def ids(pilot):
    table = pilot.app.screen_stack[0].query_one("#workers", DataTable)
    return [str(table.get_row_at(row)[0]) for row in range(table.row_count)]


def head(pilot):
    return str(pilot.app.screen_stack[0].query_one("#head", Static).content)


async def route(client):
    """Report ten more requests twenty times a second, each with its first token after 0.1 s."""
    first, over = Histogram(SECONDS), 0
    while True:
        for _ in range(10):
            first.add(0.1)
        over += 10
        load = pb.RouterLoad(over=over, output_tokens=over * 50, first_token=first.counts, gap=first.counts)
        await client.refresh(load)
        await asyncio.sleep(0.05)


async def test_it_shows_what_the_scheduler_says():
    async with site() as one, shown(one.address) as pilot:
        await until(pilot, "both workers are listed", lambda: ids(pilot) == ["decode-0", "prefill-0"])
        text = screen(pilot)
        for words in ("tok/s", "prefill    1 of 1", "decode     1 of 1", "KV 50%", "run 3"):
            assert words in text, text
        routing = asyncio.create_task(route(one.client))
        await until(pilot, "a router is counted", lambda: "1 routers" in head(pilot))
        # within the histogram's bucket of 0.1 s
        await until(pilot, "its rates are shown", lambda: "TTFT 98/108 ms" in head(pilot))
        assert not head(pilot).split("\n")[1].startswith("0.0 requests/s")
        routing.cancel()
        await one.client.deregister("decode-0")
        await until(pilot, "it is gone", lambda: ids(pilot) == ["prefill-0"])
        assert "decode-0 is gone" in screen(pilot)


async def test_nothing_happens_before_it_is_asked_twice():
    async with site() as one, shown(one.address) as pilot:
        await until(pilot, "both workers are listed", lambda: len(ids(pilot)) == 2)
        await pilot.press("d")
        await until(pilot, "it asks", lambda: "Drain decode-0?" in screen(pilot))
        await pilot.press("n")
        await pilot.press("d", "enter")
        assert (await one.client.describe()).drained == []
        await pilot.press("d", "y")
        await until(pilot, "it is drained", lambda: "decode-0 is draining" in screen(pilot))
        assert (await one.client.describe()).drained == ["decode-0"]
        await pilot.press("u", "y")
        await until(pilot, "it is undone", lambda: "takes requests again" in screen(pilot))
        assert (await one.client.describe()).drained == []
        await pilot.press("f", "y")
        flipped = "decode-0: role decode → prefill"
        await until(pilot, "it is flipped", lambda: flipped in screen(pilot))
        assert one.workers[1].role == pb.ROLE_PREFILL


async def test_a_thousand_workers_are_counted_scrolled_and_found():
    async with site() as one, AsyncExitStack() as stack:
        for number in range(1000):
            role = pb.ROLE_PREFILL if number % 4 == 0 else pb.ROLE_DECODE
            await one.client.register(identity(f"w-{number:04}", role), pb.WORKER_STATE_READY)
        pilot = await stack.enter_async_context(shown(one.address, refresh_s=3600.0))  # it asks once
        await until(pilot, "all are counted", lambda: "decode   751 of 751" in head(pilot))
        assert len(ids(pilot)) == 1002
        await pilot.press("ctrl+end")
        await until(pilot, "the last one is in sight", lambda: "w-0999" in screen(pilot))
        await pilot.press("slash", *"0123", "enter")
        await until(pilot, "one is left", lambda: ids(pilot) == ["w-0123"])
        await pilot.press("escape")
        await until(pilot, "all are back", lambda: len(ids(pilot)) == 1002)
        await pilot.press("s")
        await until(pilot, "the busy ones come first", lambda: ids(pilot)[0] == "decode-0")
        assert ids(pilot)[1] == "prefill-0"


async def test_without_an_answer_the_last_one_stays():
    async with site() as one, AsyncExitStack() as stack:
        pilot = await stack.enter_async_context(shown(one.address))
        await until(pilot, "both workers are listed", lambda: len(ids(pilot)) == 2)
        app = pilot.app
        client = app._client
        elsewhere = SchedulerClient("127.0.0.1:1")
        app._client = elsewhere
        await until(pilot, "it says so", lambda: "NO ANSWER" in head(pilot))
        assert len(ids(pilot)) == 2
        app._client = client
        stack.push_async_callback(elsewhere.close)  # at the end: a call may be in flight
        await until(pilot, "it is back", lambda: "NO ANSWER" not in head(pilot))


@pytest.mark.parametrize("width", [80, 200])
async def test_all_columns_fit(width):
    async with site() as one:
        long = "decode-of-a-machine-with-a-name-that-is-long.12345"
        await one.client.register(identity(long, pb.ROLE_DECODE), pb.WORKER_STATE_READY)
        async with shown(one.address, width) as pilot:
            await until(pilot, "all are listed", lambda: len(ids(pilot)) == 3)
            table = pilot.app.query_one("#workers", DataTable)
            assert table.virtual_size.width <= width
            assert "12345" in screen(pilot)
