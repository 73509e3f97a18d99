"""The live page as a part of the router: its socket, its content and its rights."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from baton import addresses
from baton.protos import scheduler_pb2 as pb
from baton.security.exposure import only_from_here
from baton.services import credentials
from baton.services.config import Settings
from baton.services.engine.args import VLLM_VERSION
from baton.services.errors import ConfigError, StartError
from baton.services.router.load import summed

if TYPE_CHECKING:
    from baton.services.router.chronicle import Chronicle
    from baton.services.router.served import Served

_NO_OPERATOR = (
    "With security.tls a router's certificate does not let it drain workers or change their roles: use "
    "`baton drain`, `baton undrain` and `baton role` with an operator's."
)


@dataclass(frozen=True)
class PageDoor:
    """The socket on which the page listens, and the key that it asks for; "": none."""

    sock: socket.socket
    key: str


@dataclass(frozen=True)
class Shown:
    """The router's parts that the page shows."""

    router_id: str
    served: Sequence[Served]  # one per model
    chronicle: Chronicle

    def problem(self) -> str:
        """Return which models' schedulers do not answer, and why; "" while all answer."""
        problems = {one.model.name: one.cluster.problem for one in self.served if one.cluster.problem}
        if len(self.served) == 1:
            return next(iter(problems.values()), "")
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items())

    def workers(self) -> list[pb.WorkerStatus]:
        """Return the workers of all models."""
        return [worker for one in self.served for worker in one.scheduler.standby.workers]

    def load(self) -> pb.RouterLoad:
        """Return the load and latencies of this router's requests."""
        return summed([one.parts.counts.message(one.parts.waiting) for one in self.served])

    def live(self) -> int:
        """Return how many requests wait or run."""
        return sum(one.client.live for one in self.served)


def open_door(settings: Settings) -> PageDoor | None:
    """Listen for the page; return None if `ops.listen` is empty.

    Raises ConfigError and StartError: others could reach it without a key, the port is taken.
    """
    where = settings.ops.listen
    if not where:
        return None
    key = credentials.page_key(settings.ops)
    host, port = addresses.split(where)
    if not key and not only_from_here(host):
        raise ConfigError(
            f"ops.listen: {where} can be reached from other machines, which could see requests and drain "
            "workers: set ops.key or ops.key_file"
        )
    try:
        return PageDoor(addresses.listen(host, port), key)
    except OSError as error:
        raise StartError(
            f"ops.listen: cannot listen on {where}: {error.strerror or error}; choose another address, or an "
            "empty one for no page"
        ) from None


@contextlib.asynccontextmanager
async def live_page(door: PageDoor | None, settings: Settings, shown: Shown) -> AsyncIterator[None]:
    """Serve the page inside the block; without a door, nothing."""
    if door is None:
        yield
        return
    from baton.services.router.ops import server
    from baton.services.router.ops.actions import Actions
    from baton.services.router.ops.door import Door
    from baton.services.router.ops.feed import Feed, Sources
    from baton.services.router.ops.series import Series

    forbidden = _NO_OPERATOR if settings.security.tls else ""
    about = {
        "model": ", ".join(one.model.name for one in shown.served),
        "topic": settings.scheduler.topic,
        "router": shown.router_id,
        "version": f"Baton {version('baton')}, vLLM {VLLM_VERSION}",
        "forbidden": forbidden,
    }
    feed = Feed(Sources(about, shown.workers, shown.problem, Series(shown.load, shown.live)))
    shown.chronicle.listeners.append(feed.over)
    actions = Actions([one.scheduler for one in shown.served], feed.events, forbidden)
    app = server.build_app(feed, shown.chronicle.recent, actions, Door(door.key))
    async with server.serving(app, feed, door.sock):
        yield
