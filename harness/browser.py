"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Page

CHROMIUM = "chromium"
_QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--enable-precise-memory-info", "--js-flags=--expose-gc"),
]


def why_not() -> str:
    """Return why no browser can start on this machine, or ""."""
    return "" if shutil.which(CHROMIUM) else f"{CHROMIUM} is not installed (Debian's package of that name)"


@contextlib.asynccontextmanager
async def browser_page(**options: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """Yield an empty page with these options, and the list of its errors and warnings."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which(CHROMIUM), args=_QUIET)
        try:
            page = await browser.new_page(**options)
            problems: list[str] = []
            kinds = {"error", "warning"}
            page.on("console", lambda told: problems.append(told.text) if told.type in kinds else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            yield page, problems
        finally:
            await browser.close()
