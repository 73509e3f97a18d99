"""The live page in a real browser, under load and a kill, shows the deployment's true state."""

import asyncio
import os
import random

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.services.overview.workers import COLUMNS
from harness.browser import browser_page, why_not
from harness.deployment import deployment
from harness.greedy import ask
from harness.live_page import live_page
from harness.prompts import prompts
from harness.scheduling import until
from harness.support import PATIENCE, QUICK, ROOT, free_port

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

WAIT_S = 15.0
WAIT_MS = 1e3 * WAIT_S * PATIENCE
FIGURES = ROOT / "docs" / "figures"
TAKE = "TAKE_SCREENSHOTS"  # environment variable that updates the documentation's screenshots


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Start 1P2D with a live page."""
    listen = f"127.0.0.1:{free_port()}"
    settings = {"constants": QUICK, "ops": {"listen": listen}}
    with deployment(tmp_path_factory.mktemp("watched"), **settings) as one:
        yield one.up(1, 2)


async def shot(page, name):
    if os.environ.get(TAKE):
        await page.screenshot(path=str(FIGURES / f"live-page-{name}.png"))


def of_scheduler(one):
    """Return each worker's role according to the scheduler."""
    return {
        worker.identity.worker_id: pb.Role.Name(worker.identity.role).removeprefix("ROLE_").lower()
        for worker in one.describe().workers
    }


async def on_page(page):
    """Return each worker that the page shows as present, with its label."""
    shown = await page.eval_on_selector_all(
        "[data-worker]:not(.gone)",
        "all => all.map(one => [one.dataset.worker, one.getAttribute('aria-label')])",
    )
    return dict(shown)


async def until_same(page, one):
    """Wait until the page shows the scheduler's workers with their roles."""

    async def same():
        shown, known = await on_page(page), of_scheduler(one)
        return shown.keys() == known.keys() and all(role in shown[name] for name, role in known.items())

    await until(same, WAIT_S)


@pytest.mark.timeout(120)
async def test_load_a_kill_and_an_operator(watched):
    url = f"http://{watched.config['ops']['listen']}/ops"
    async with (
        browser_page(viewport={"width": 1400, "height": 900}) as (page, problems),
        watched.async_client() as client,
    ):
        await page.goto(url)
        await page.wait_for_selector("[data-worker]", timeout=WAIT_MS)
        await until_same(page, watched)

        running = [
            asyncio.create_task(ask(client, prompts()[number * 4], max_tokens=150)) for number in range(6)
        ]

        async def decodes():
            return any(
                one.load.running for one in watched.describe().workers if one.identity.role == pb.ROLE_DECODE
            )

        await until(decodes, WAIT_S)
        victim = next(name for name, role in of_scheduler(watched).items() if role == "decode")
        os.kill(int(victim.rpartition(".")[2]), 9)
        await asyncio.gather(*running)
        await page.wait_for_selector(f"[data-worker='{victim}'].gone", timeout=WAIT_MS)
        await page.wait_for_selector("#events li:has-text('gone')", timeout=WAIT_MS)
        await page.wait_for_selector("#requests tbody tr.warning", timeout=WAIT_MS)
        await shot(page, "kill")

        # The waterfall of a request that lost its worker shows both attempts and the cause.
        await page.click("#requests tbody tr.warning")
        told = await page.inner_text("#waterfall")
        assert victim in told
        assert "decode" in told
        assert await page.locator("#waterfall .mark").count() > 0
        await shot(page, "waterfall")
        await page.keyboard.press("Escape")

        await until_same(page, watched)  # the killed worker is back
        target = next(name for name, role in of_scheduler(watched).items() if role == "decode")
        await page.locator(f"[data-worker='{target}']").press("Enter")
        await page.click("#worker button:has-text('make it mixed')")
        assert of_scheduler(watched)[target] == "decode"  # not confirmed yet
        await page.click("#confirm")
        await page.wait_for_selector("#said:has-text('mixed')", timeout=WAIT_MS)
        assert of_scheduler(watched)[target] == "mixed"
        await page.keyboard.press("Escape")
        await until_same(page, watched)

        await page.emulate_media(color_scheme="dark")
        await shot(page, "dark")
        assert not problems


@pytest.mark.timeout(90)
async def test_a_thousand_workers_stay_readable(tmp_path):
    draw = random.Random(7)
    roles = [pb.ROLE_PREFILL] * 390 + [pb.ROLE_ENCODE] * 10 + [pb.ROLE_DECODE] * 600
    names = [f"{pb.Role.Name(role)[5:].lower()}-{number}" for number, role in enumerate(roles)]
    async with live_page() as live, browser_page(viewport={"width": 390, "height": 800}) as (page, problems):
        await live.register(*zip(names, roles, strict=True))
        await live.beat(*names, draw=draw)
        await page.goto(f"{live.url}/ops")
        await page.wait_for_selector("[data-worker]", timeout=WAIT_MS)

        async def all_shown():
            return len(await on_page(page)) == len(names)

        await until(all_shown, WAIT_S)
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390  # no sideways scrolling on a phone
        await page.fill("input[aria-label='search workers']", "decode-99")

        async def found():
            return set(await on_page(page)) == {name for name in names if "decode-99" in name}

        await until(found, WAIT_S)
        assert not problems


def test_each_column_is_used():
    """Every column that is sent is used by the page."""
    static = ROOT / "services" / "router" / "ops" / "static"
    text = "".join(path.read_text() for path in static.glob("*.js"))
    assert [name for name in COLUMNS if f".{name}" not in text] == []
