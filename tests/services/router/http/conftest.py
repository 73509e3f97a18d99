"""Routers in their own processes, and a small server behind the router's connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import zygote
from harness.checkpoints import tiny_qwen2
from harness.doors import Seen, Server, serving
from tests.services.router.http.site import StartRouter

FAST = {
    "baton.services.router.cluster:FRESH_S": 0.05,  # /health soon knows of a change
    "baton.services.tenants.shared:CALL_S": 2.0,  # the machine may be busy
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start_router(model: Path) -> Iterator[StartRouter]:
    """Return a function that starts a router for the tiny model; its output goes to FOLDER/router.log."""
    started: list[zygote.Forked] = []

    def start(folder: Path, environment: dict[str, str] | None = None, **settings: Any) -> zygote.Forked:
        folder.mkdir(exist_ok=True)
        settings["engine"] = {"model": str(model), **settings.get("engine", {})}
        arguments: dict[str, Any] = {"kind": "router", "settings": settings, "environment": environment or {}}
        started.append(
            zygote.shared().start("router", "harness.forked:run", folder, constants=FAST, **arguments)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Seen()) as one:
        yield one
