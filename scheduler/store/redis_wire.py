"""The arguments and replies of the Redis store's scripts, from and into the scheduler's objects.

Replies are flat: key, value, key, value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.types import Booking, Known, Reserved, WorkerRecord, name_of

Flat = list[bytes]


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, at least 1."""
    return max(1, round(seconds * 1_000))


def pairs(flat: Flat) -> Iterator[tuple[str, bytes]]:
    """Yield key and value of each entry of a flat reply."""
    items = iter(flat)
    return ((key.decode(), value) for key, value in zip(items, items, strict=True))


def identities(flat: Flat) -> dict[str, pb.WorkerIdentity]:
    """Return identities by worker id."""
    return {key: pb.WorkerIdentity.FromString(raw) for key, raw in pairs(flat)}


def workers(
    now: int,
    known: dict[str, pb.WorkerIdentity],
    *,
    states: Flat,
    loads: Flat,
    leases: Flat,
    drained: frozenset[str],
) -> dict[str, WorkerRecord]:
    """Return workers by id, without bookings. Times are milliseconds of the server's clock."""
    state_of, load_of = dict(pairs(states)), dict(pairs(loads))
    found = {}
    for key, until in pairs(leases):
        if key not in known or key not in state_of:
            continue  # evicted: its next heartbeat mends it
        load = load_of.get(key)
        found[key] = WorkerRecord(
            identity=known[key],
            state=cast(pb.WorkerState, int(state_of[key])),
            load=None if load is None else pb.WorkerLoad.FromString(load),
            reserved=Reserved(),
            drain_asked=name_of(known[key]) in drained,
            lease_left_s=(float(until) - now) / 1_000,
        )
    return found


def drains(flat: Flat) -> dict[str, int]:
    """Return how often each name was drained or undrained."""
    return {name: int(count) for name, count in pairs(flat)}


def requests(now: int, flat: Flat) -> Iterator[Known]:
    """Yield requests, live and past, of a reply with four items each: id, attempt, end of lease, epoch."""
    items = iter(flat)
    for name, attempt, until, epoch in zip(items, items, items, items, strict=True):
        left_ms = float(until) - now
        if attempt and left_ms > 0:
            entry = json.loads(attempt)
            yield _live(Attempt(name.decode(), entry["epoch"]), entry, left_ms / 1_000)
        elif epoch:
            yield Known(Attempt(name.decode(), int(epoch.rstrip(b"!"))), over=epoch.endswith(b"!"))


def attempt(known: Known) -> bytes:
    """Return a live attempt as the scripts keep it."""
    booking = known.booking
    if booking is None:
        return b""
    entry = {
        "epoch": booking.attempt.epoch,
        "router": booking.router_id,
        "prefill": booking.prefill_id,
        "decode": booking.decode_id,
        "tokens": booking.prompt_tokens,
        "blocks": booking.blocks,
        "read": known.prefilled,
    }
    return json.dumps(entry).encode()


def merge_arguments(
    workers: Sequence[WorkerRecord], requests: Sequence[Known], drains: Mapping[str, int]
) -> list[str | int | bytes]:
    """Return the arguments of `merge.lua`, but the first."""
    model = workers[0].identity.model if workers else ""
    arguments: list[str | int | bytes] = [len(workers), model, len(drains)]
    for name, count in drains.items():
        arguments += (name, count)
    for worker in workers:
        load = worker.load.SerializeToString() if worker.load is not None else b""
        arguments += (worker.worker_id, worker.epoch, worker.identity.SerializeToString(), int(worker.state))
        arguments += (load, milliseconds(worker.lease_left_s), name_of(worker.identity))
    for known in requests:
        stage = "live" if known.booking else "over" if known.over else "placed"
        lease_ms = milliseconds(known.lease_s) if known.booking else 0
        arguments += (known.attempt.request_id, known.attempt.epoch, stage, lease_ms, attempt(known))
    return arguments


def live_message(request_id: str, entry: dict[str, Any], lease_left_s: float) -> pb.LiveAttempt:
    """Return a live attempt's message for operators."""
    return pb.LiveAttempt(
        attempt=pb.Attempt(request_id=request_id, epoch=entry["epoch"]),
        prefill_worker_id=entry["prefill"],
        decode_worker_id=entry["decode"],
        prefilled=entry["read"],
        lease_left_s=max(0.0, lease_left_s),
    )


def past(entry: dict[str, Any], now: int) -> pb.PastHandoff:
    """Return a finished attempt's message for operators."""
    event = pb.Finished.FromString(base64.b64decode(entry["finished"]))
    return pb.PastHandoff(
        attempt=event.attempt,
        prefill_worker_id=entry["prefill"],
        decode_worker_id=entry["decode"],
        outcome=event.outcome,
        cost=event.cost,
        age_s=(now - entry["ended"]) / 1_000,
    )


def _live(of: Attempt, entry: dict[str, Any], lease_s: float) -> Known:
    booking = Booking(
        attempt=of,
        router_id=entry["router"],
        prefill_id=entry["prefill"],
        decode_id=entry["decode"],
        prompt_tokens=entry["tokens"],
        blocks=entry["blocks"],
    )
    return Known(of, booking, entry["read"], lease_s=lease_s)
