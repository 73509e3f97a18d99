"""The cost of the live page: a browser's memory over time, and the router's CPU a token while pages are open.

    python -m bench live-page               both
    python -m bench live-page --seconds 20  shorter

The browser is a real Chromium, at 10 messages a second, with 50 and 1,000 workers of a real scheduler whose
loads change all the time. The router is `bench router`'s, with and without readers of its page, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from baton.protos import scheduler_pb2 as pb
from bench import router
from harness.browser import browser_page
from harness.live_page import LivePage, live_page
from harness.stats import median, save
from harness.support import free_port

FLEETS = (50, 1_000)
READERS = 2
HEAP_EVERY_S = 5.0


async def browser(workers: int, seconds: float) -> dict[str, Any]:
    """Return first paint and the heap of a page that is open for so long."""
    names = [f"{'prefill' if number % 3 == 0 else 'decode'}-{number}" for number in range(workers)]
    roles = {name: pb.ROLE_PREFILL if name.startswith("prefill") else pb.ROLE_DECODE for name in names}
    async with (
        live_page(tick_s=0.1) as live,
        browser_page(viewport={"width": 1400, "height": 900}) as (page, problems),
    ):
        await live.register(*roles.items())
        beating = asyncio.create_task(_beat(live, names))
        await page.goto(f"{live.url}/ops")
        await page.wait_for_selector("[data-worker]")
        paint = await page.evaluate("performance.getEntriesByName('first-paint')[0]?.startTime ?? null")
        heaps = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            await asyncio.sleep(HEAP_EVERY_S)
            heaps.append(await page.evaluate("(window.gc(), performance.memory.usedJSHeapSize)") / 2**20)
        message = len(live.feed._encode())
        beating.cancel()
    half = len(heaps) // 2
    return {
        "workers": workers,
        "seconds": seconds,
        "messages_per_s": 10,
        "message_kb": round(message / 1e3, 1),
        "first_paint_ms": round(paint) if paint is not None else None,
        "heap_mib_first_half": round(median(heaps[:half]), 2),
        "heap_mib_second_half": round(median(heaps[half:]), 2),
        "errors": len(problems),
    }


async def _beat(live: LivePage, names: list[str]) -> None:
    draw = random.Random(1)
    while True:
        await live.beat(*draw.sample(names, min(len(names), 50)), draw=draw)
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def readers(port: int, number: int) -> Iterator[None]:
    """Read the page's feed, so many times, inside the block."""
    over = threading.Event()

    def read() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ops/feed", timeout=30) as feed:
            while not over.is_set():
                feed.readline()

    threads = [threading.Thread(target=read, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(5)


def routers(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the router's figures by arm: without the page, with it, with readers of it."""
    runs: dict[str, list[dict[str, Any]]] = {"no page": [], "a page": [], f"{READERS} readers": []}
    for _ in range(rounds):
        for arm, found in runs.items():
            port = free_port()
            page = "" if arm == "no page" else f"127.0.0.1:{port}"
            beside = readers(port, READERS) if arm.endswith("readers") else None
            found.append(router.measure(router.options_of([]), 2.0, page=page, beside=beside))
            print(arm, json.dumps(found[-1]), flush=True)
    return runs


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="that a browser looks")
    parser.add_argument("--rounds", type=int, default=5, help="of the router, A B C")
    options = parser.parse_args(arguments)
    pages = [asyncio.run(browser(workers, options.seconds)) for workers in FLEETS]
    print(json.dumps(pages), flush=True)
    runs = routers(options.rounds)
    cpu = {arm: median([one["router_cpu_us_per_token"] for one in found]) for arm, found in runs.items()}
    save("live-page", {"browser": pages, "router_cpu_us_per_token": cpu, "runs": runs})
    print(json.dumps(cpu), flush=True)
