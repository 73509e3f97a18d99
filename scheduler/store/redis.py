"""The state in Redis: it outlives the scheduler, and several schedulers may share it.

Each method of the interface is one Lua script (`scripts/`), so one atomic step; calls made side by side share
a round trip (`redis_calls`). The layout and the times to live stand in `baton.scheduler.keys`.
"""

from __future__ import annotations

import base64
import json
import socket
import uuid
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from redis.exceptions import (
    BusyLoadingError,
    InvalidResponse,
    OutOfMemoryError,
    RedisError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton import redis_link
from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.redis_elsewhere import elsewhere, leads_elsewhere
from baton.redis_url import FORM, without_password
from baton.redis_user import explained, refuses_the_user
from baton.scheduler.errors import StaleWorker, StoreRefuses, StoreUnavailable
from baton.scheduler.keys import lua_header, topic_keys
from baton.scheduler.store import redis_wire as wire
from baton.scheduler.store.base import TOLD_KINDS, Store
from baton.scheduler.store.redis_calls import ScriptCalls
from baton.scheduler.store.redis_fleet import RedisFleet
from baton.scheduler.types import (
    Claim,
    Deployment,
    FleetView,
    Heard,
    History,
    Known,
    ReportResult,
    ReserveOutcome,
    ReserveResult,
    RouterReport,
    State,
    Told,
    drained_of,
    name_of,
)

CALL_TIMEOUT_S = 0.9  # of a batch of calls: connecting, the scripts
MERGE_ITEMS = 512  # workers, and as many requests, in one call of `merge`
EXPORT_REQUESTS = 256  # in one call of `export`: some 0.5 ms of the server
SCRIPTS = (
    *("view", "reserve", "report", "register", "heartbeat", "deregister", "drain", "history"),
    *("export", "merge", "take_turn", "tell", "lead", "told", "order"),
)


class RedisStore(Store):
    """A store in Redis. Connects on first use and again by itself.

    A call is never repeated: its script may have run without a reply.
    """

    def __init__(self, url: str, topic: str, password: str = "") -> None:
        self.name = without_password(url)
        self._host = self.name.partition("://")[2].partition("/")[0]  # for messages
        self._topic = topic
        self._keys = topic_keys(topic)
        try:
            # `ScriptCalls` ends calls that wait too long for a connection or a reply.
            self._client = redis_link.connect(url, self._keys[0], password=password, max_connections=1)
        except ValueError:  # its words may quote a password
            raise StoreRefuses(
                f"scheduler.store is not a Redis URL: it must look like {FORM}, "
                "with the password percent-encoded or in a file (scheduler.store_password_file)"
            ) from None
        self._password: str = self._client.connection_pool.connection_kwargs.get("password") or ""
        sources = {name: _source(name) for name in SCRIPTS}
        self._calls = ScriptCalls(self._client, sources, self._keys, CALL_TIMEOUT_S)
        # Identities are fetched anew only when the roster has changed: they are most of a view's bytes.
        self._roster = b""
        self._identities: dict[str, pb.WorkerIdentity] = {}
        self._fleet = RedisFleet()
        self._viewed = b""  # the generation of the last view

    async def view(self) -> FleetView:
        asked, fleet = self._roster, self._fleet
        reply = await self._run("view", asked, fleet.since, self._viewed)
        now, expired, live, self._viewed, roster, identities, revision, whole, changed, drains, *told = reply
        known = self._known(asked, roster, identities)
        drained = drained_of(wire.drains(drains))
        fleet.learn(
            now,
            known,
            drained,
            revision=revision,
            whole=bool(whole),
            changed=[key.decode() for key in changed],
            fleet=told,
        )
        generation = self._viewed.decode()
        return FleetView(fleet.workers, live, expired, generation, drained, fleet.by_roles)

    async def reserve(self, claim: Claim, lease_s: float) -> ReserveResult:
        booking = claim.booking
        outcome, detail, expired = await self._run(
            "reserve",
            booking.attempt.request_id,
            booking.attempt.epoch,
            wire.milliseconds(lease_s),
            booking.router_id,
            booking.prefill_id,
            booking.decode_id,
            booking.prompt_tokens,
            booking.blocks,
            claim.max_prompt_tokens,
            claim.max_requests,
            claim.max_blocks,
            int(pb.WORKER_STATE_READY),
        )
        return ReserveResult(ReserveOutcome(outcome.decode()), detail.decode(), expired)

    async def report(self, report: RouterReport, lease_s: float) -> ReportResult:
        events: list[tuple[str, Attempt, bytes]] = [
            *(("placed", known.attempt, wire.attempt(known)) for known in report.placed),
            *(("prefilled", attempt, b"") for attempt in report.prefilled),
            *(
                ("finished", attempt, base64.b64encode(event.SerializeToString()))
                for attempt, event in report.finished
            ),
            *(("renewed", attempt, b"") for attempt in report.renewed),
            *(("shared", attempt, str(blocks).encode()) for attempt, blocks in report.shared),
        ]
        if not events:
            return ReportResult()
        arguments: list[str | int | bytes] = [wire.milliseconds(lease_s)]
        for kind, attempt, raw in events:
            arguments += (kind, attempt.request_id, attempt.epoch, raw)
        stale, lost, fenced = await self._run("report", *arguments)
        return ReportResult(
            lost=[events[index][1] for index in lost],
            fenced=[events[index][1] for index in fenced],
            stale=stale,
        )

    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState, lease_s: float) -> str:
        newcomer = Deployment.of(identity)
        runs = await self._run(
            "register",
            identity.worker_id,
            identity.SerializeToString(),
            int(state),
            wire.milliseconds(lease_s),
            newcomer.model,
            name_of(identity),
            identity.epoch,
        )
        if isinstance(runs, int):
            raise StaleWorker(identity.worker_id, identity.epoch, runs)
        return Deployment(*(part.decode() for part in runs)).refusal(self._topic, newcomer) if runs else ""

    async def heartbeat(
        self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad, lease_s: float, epoch: int = 0
    ) -> Heard:
        known, drain, stale = await self._run(
            "heartbeat", worker_id, int(state), load.SerializeToString(), wire.milliseconds(lease_s), epoch
        )
        return Heard(known=bool(known), drain=bool(drain), stale=bool(stale))

    async def deregister(self, worker_id: str, epoch: int = 0) -> bool:
        return bool(await self._run("deregister", worker_id, epoch))

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        return bool(await self._run("drain", name, int(not undo)))

    async def take_turn(self, what: str, for_s: float) -> bool:
        return bool(await self._run("take_turn", what, wire.milliseconds(for_s)))

    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        orders: bytes = await self._run("tell", f"{kind}:{who}", message, wire.milliseconds(lease_s))
        return orders

    async def lead(self, who: str, for_s: float) -> int:
        return int(await self._run("lead", who, wire.milliseconds(for_s)))

    async def told(self) -> Told:
        messages, orders = await self._run("told")
        by_kind: dict[str, dict[str, bytes]] = {kind: {} for kind in TOLD_KINDS}
        for key, message in wire.pairs(messages):
            kind, _, who = key.partition(":")
            by_kind[kind][who] = message
        return Told(
            by_kind["router"], by_kind["fleet"], _by_fleet(orders), by_kind["process"], by_kind["turns"]
        )

    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        flat = [part for fleet, raw in orders.items() for part in (f"fleet:{fleet}", raw)]
        return bool(await self._run("order", fence, *flat))

    async def history(self, limit: int) -> History:
        now, leases, attempts, handoffs = await self._run("history", limit)
        live = [
            wire.live_message(key, json.loads(text), (float(until) - now) / 1_000)
            for (key, until), text in zip(wire.pairs(leases), attempts, strict=True)
        ]
        return History(live, [wire.past(json.loads(text), now) for text in handoffs])

    async def export(self, since: int = 0) -> State:
        """Export in pieces, each of them atomic."""
        requests: list[Known] = []
        more = True
        while more:
            asked = self._roster
            reply = await self._run("export", since, EXPORT_REQUESTS, asked)
            now, generation, since, more, changed, roster, identities, *rest = reply
            requests += wire.requests(now, changed)
        states, loads, epochs, leases, flat = rest
        drains = wire.drains(flat)
        drained = drained_of(drains)
        known = self._known(asked, roster, identities)
        workers = wire.workers(now, known, states=states, loads=loads, leases=leases, drained=drained)
        for key, epoch in wire.pairs(epochs):
            if key in workers:
                workers[key].epoch = int(epoch)
        return State(generation.decode(), tuple(workers.values()), tuple(requests), since, drains)

    async def merge(self, state: State) -> str:
        """Merge in pieces, each of them atomic."""
        candidate = state.generation or uuid.uuid4().hex
        last = max(len(state.workers), len(state.requests), 1)
        for begin in range(0, last, MERGE_ITEMS):
            end = begin + MERGE_ITEMS
            drains = state.drains if begin == 0 else {}
            piece = wire.merge_arguments(state.workers[begin:end], state.requests[begin:end], drains)
            generation = await self._run("merge", candidate, *piece)
            self.generation = generation.decode()
        return self.generation

    async def close(self) -> None:
        await self._calls.close()
        await redis_link.hang_up(self._client)

    def _known(self, asked: bytes, roster: bytes, identities: wire.Flat) -> dict[str, pb.WorkerIdentity]:
        """Return identities by worker id; the reply has them where its roster is not the one `asked` with."""
        if roster != asked:
            self._identities = wire.identities(identities)
            self._roster = roster
        return self._identities

    async def _run(self, name: str, *arguments: str | int | bytes) -> Any:
        """Return one script's reply, as Redis gives it. Raises StoreUnavailable, StoreRefuses."""
        try:
            return await self._calls.call(name, arguments)
        except (RedisError, OSError, TimeoutError) as error:
            kind = StoreRefuses if _for_good(error) or leads_elsewhere(error, self.name) else StoreUnavailable
            text = elsewhere(error, self.name, "scheduler.store") or _explain(error)
            if self._password:  # a server that does not know a command repeats its arguments
                text = text.replace(self._password, "***")
            raise kind(f"redis at {self._host} {text}") from None


def _by_fleet(orders: wire.Flat) -> dict[str, bytes]:
    return {key.removeprefix("fleet:"): raw for key, raw in wire.pairs(orders)}


def _source(name: str) -> str:
    folder = files(__package__) / "scripts"
    parts = (folder / f"{part}.lua" for part in ("prelude", name))
    return "\n".join([lua_header(), *(part.read_text("utf-8") for part in parts)])


def _is_nobodys_name(error: BaseException) -> bool:
    """Return whether nobody has that name. One that cannot be resolved for now may be down with Redis."""
    cause = error.__cause__ or error.__context__ or error
    return isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME


def _for_good(error: BaseException) -> bool:
    """Return whether an operator has to change something, as far as can be told."""
    wrong_database = "DB index is out of range" in str(error)
    no_redis = isinstance(error, InvalidResponse)
    return refuses_the_user(error) or _is_nobodys_name(error) or wrong_database or no_redis


def _explain(error: BaseException) -> str:
    """Say what is wrong and what to do, in a line."""
    text = " ".join(str(error).split())
    if isinstance(error, BusyLoadingError):
        return "still loads its data; it will answer when that is done"
    if isinstance(error, OutOfMemoryError):
        return f"is full ({text}); raise its maxmemory"
    if refuses_the_user(error):
        return explained(error, "scheduler.store or scheduler.store_password_file")
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "does not answer in time; is it up, and is this the right address?"
    if isinstance(error, ConnectionError | OSError) or type(error).__name__ == "ConnectionError":
        return f"does not answer ({text}); is it up, and is this the right address?"
    return f"refused a command: {text}"
