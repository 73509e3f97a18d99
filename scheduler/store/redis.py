"""The state in Redis: it outlives the scheduler, and several schedulers may share it.

Each method of the interface is one Lua script (`scripts/`), so one round trip and one atomic step. The layout
and the times to live stand in `baton.scheduler.keys`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Coroutine, Iterator
from importlib.resources import files
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, BusyLoadingError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StoreUnavailable
from baton.scheduler.keys import lua_header, topic_keys
from baton.scheduler.store.base import Store
from baton.scheduler.types import (
    Attempt,
    Claim,
    Deployment,
    Heard,
    History,
    Report,
    ReportResult,
    Reserved,
    ReserveOutcome,
    ReserveResult,
    View,
    WorkerRecord,
)

MAX_CONNECTIONS = 16  # Redis runs one script at a time: more would only wait there
CALL_TIMEOUT_S = 0.9  # of a whole call: a free connection, connecting, the script
# A call is given up after so many looks at it, not after one timer: where this process itself was held up
# (0.4 s was seen on a machine with five busy processes a core), timer and reply come due at the same moment.
LOOKS = 4
SCRIPTS = ("view", "reserve", "report", "register", "heartbeat", "deregister", "drain", "history")

Pairs = list[bytes]  # flat: key, value, key, value


class RedisStore(Store):
    """Connects on first use and again by itself. A call is never repeated: a script may have run unseen."""

    def __init__(self, url: str, topic: str) -> None:
        self.name = without_password(url)
        self._host = urlsplit(self.name).netloc  # for messages
        self._topic = topic
        self._keys = topic_keys(topic)
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                # `_patiently` ends a call that waits for a free connection, for connecting or for the reply.
                timeout=None,
                socket_timeout=None,
                socket_connect_timeout=None,
                retry=Retry(NoBackoff(), 0),
                # With it the pool would hand out connections that the server has closed.
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            )
        except ValueError as error:
            raise StoreUnavailable(f"scheduler.store {self.name!r} is not a Redis URL: {error}") from None
        self._client = Redis(connection_pool=pool)
        self._scripts = {name: self._client.register_script(_source(name)) for name in SCRIPTS}
        # Identities are read anew only when the roster has changed: they are most of a view's bytes.
        self._roster = b""
        self._identities: dict[str, pb.WorkerIdentity] = {}

    async def view(self) -> View:
        reply = await self._run("view", self._roster)
        now, expired, live, roster, identities, states, loads, leases, draining, *booked = reply
        if roster != self._roster:
            self._identities = {key: pb.WorkerIdentity.FromString(raw) for key, raw in _pairs(identities)}
            self._roster = roster
        state_of, load_of = dict(_pairs(states)), dict(_pairs(loads))
        tokens, requests, blocks = (dict(_pairs(counters)) for counters in booked)
        asked = {key.decode() for key in draining}
        workers = {}
        for key, until in _pairs(leases):
            if key not in self._identities or key not in state_of:
                continue  # evicted: its next heartbeat mends it
            load = load_of.get(key)
            workers[key] = WorkerRecord(
                identity=self._identities[key],
                state=cast(pb.WorkerState, int(state_of[key])),
                load=None if load is None else pb.WorkerLoad.FromString(load),
                reserved=Reserved(
                    int(tokens.get(key, 0)), int(requests.get(key, 0)), int(blocks.get(key, 0))
                ),
                drain_asked=key in asked,
                lease_left_s=(float(until) - now) / 1_000,
            )
        return View(workers=workers, live_attempts=live, expired=expired)

    async def reserve(self, claim: Claim, lease_s: float) -> ReserveResult:
        outcome, detail, expired = await self._run(
            "reserve",
            claim.attempt.request_id,
            claim.attempt.epoch,
            _milliseconds(lease_s),
            claim.router_id,
            claim.prefill_id,
            claim.decode_id,
            claim.prompt_tokens,
            claim.blocks,
            claim.max_prompt_tokens,
            claim.max_requests,
            claim.max_blocks,
            int(pb.WORKER_STATE_READY),
        )
        return ReserveResult(ReserveOutcome(outcome.decode()), detail.decode(), expired)

    async def report(self, report: Report, lease_s: float) -> ReportResult:
        events: list[tuple[str, Attempt, bytes]] = [
            *(("prefilled", attempt, b"") for attempt in report.prefilled),
            *(
                ("finished", attempt, base64.b64encode(event.SerializeToString()))
                for attempt, event in report.finished
            ),
            *(("renewed", attempt, b"") for attempt in report.renewed),
        ]
        if not events:
            return ReportResult()
        arguments: list[str | int | bytes] = [_milliseconds(lease_s)]
        for kind, attempt, raw in events:
            arguments += (kind, attempt.request_id, attempt.epoch, raw)
        stale, lost = await self._run("report", *arguments)
        return ReportResult(lost=[events[index][1] for index in lost], stale=stale)

    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState, lease_s: float) -> str:
        newcomer = Deployment.of(identity)
        runs = await self._run(
            "register",
            identity.worker_id,
            identity.SerializeToString(),
            int(state),
            _milliseconds(lease_s),
            newcomer.model,
            newcomer.model_fingerprint,
            newcomer.vllm_version,
        )
        return Deployment(*(part.decode() for part in runs)).refusal(self._topic, newcomer) if runs else ""

    async def heartbeat(
        self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad, lease_s: float
    ) -> Heard:
        known, drain = await self._run(
            "heartbeat", worker_id, int(state), load.SerializeToString(), _milliseconds(lease_s)
        )
        return Heard(known=bool(known), drain=bool(drain))

    async def deregister(self, worker_id: str) -> None:
        await self._run("deregister", worker_id)

    async def drain(self, worker_id: str) -> bool:
        return bool(await self._run("drain", worker_id))

    async def history(self, limit: int) -> History:
        now, leases, attempts, handoffs = await self._run("history", limit)
        live = [
            _live_message(key, json.loads(text), (float(until) - now) / 1_000)
            for (key, until), text in zip(_pairs(leases), attempts, strict=True)
        ]
        return History(live, [_past(json.loads(text), now) for text in handoffs])

    async def close(self) -> None:
        try:
            await self._client.aclose()
            await self._client.connection_pool.disconnect()
        except (RedisError, OSError):
            return  # what is not connected need not be closed

    async def _run(self, name: str, *arguments: str | int | bytes) -> Any:
        """One script's reply, as Redis gives it. Raises StoreUnavailable."""
        try:
            return await _patiently(self._scripts[name](keys=self._keys, args=arguments))
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"redis at {self._host} {_explain(error)}") from error


async def _patiently(call: Coroutine[Any, Any, Any]) -> Any:
    """The call's outcome. Raises TimeoutError after `CALL_TIMEOUT_S`."""
    task = asyncio.create_task(call)
    try:
        for _ in range(LOOKS):
            await asyncio.wait({task}, timeout=CALL_TIMEOUT_S / LOOKS)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()  # the client drops the connection, so that no late reply is taken for another's
            await asyncio.wait({task})


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    user = f"{parts.username}@" if parts.username else ""
    return urlunsplit(parts._replace(netloc=user + host))


def _source(name: str) -> str:
    folder = files(__package__) / "scripts"
    parts = (folder / f"{part}.lua" for part in ("prelude", name))
    return "\n".join([lua_header(), *(part.read_text("utf-8") for part in parts)])


def _explain(error: BaseException) -> str:
    """What is wrong and what to do, in a line."""
    text = " ".join(str(error).split())
    if isinstance(error, BusyLoadingError):
        return "still loads its data; it will answer when that is done"
    if isinstance(error, AuthenticationError | AuthorizationError) or text.startswith(
        ("WRONGPASS", "NOAUTH")
    ):
        return f"refused the password ({text}); put the right one into scheduler.store"
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "does not answer in time; is it up, and is this the right address?"
    if isinstance(error, ConnectionError | OSError) or type(error).__name__ == "ConnectionError":
        return f"does not answer ({text}); is it up, and is this the right address?"
    return f"refused a command: {text}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))


def _pairs(flat: Pairs) -> Iterator[tuple[str, bytes]]:
    """Key and value of each entry of a flat reply."""
    items = iter(flat)
    return ((key.decode(), value) for key, value in zip(items, items, strict=True))


def _live_message(request_id: str, entry: dict[str, Any], lease_left_s: float) -> pb.LiveAttempt:
    return pb.LiveAttempt(
        attempt=pb.Attempt(request_id=request_id, epoch=entry["epoch"]),
        prefill_worker_id=entry["prefill"],
        decode_worker_id=entry["decode"],
        prefilled=entry["read"],
        lease_left_s=max(0.0, lease_left_s),
    )


def _past(entry: dict[str, Any], now: int) -> pb.PastHandoff:
    event = pb.Finished.FromString(base64.b64decode(entry["finished"]))
    return pb.PastHandoff(
        attempt=event.attempt,
        prefill_worker_id=entry["prefill"],
        decode_worker_id=entry["decode"],
        outcome=event.outcome,
        cost=event.cost,
        age_s=(now - entry["ended"]) / 1_000,
    )
