"""The changes between two descriptions of a deployment, in one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.protos import scheduler_pb2 as pb
from baton.services import roles
from baton.services.top.view import state_of


def between(before: pb.Description, now: pb.Description) -> Iterator[str]:
    old, new = _workers(before), _workers(now)
    yield from (f"{name}: new, a {_role(new[name])} worker" for name in new if name not in old)
    yield from (f"{name}: gone, {state_of(old[name])} until then" for name in old if name not in new)
    for name in new:
        if name in old:
            yield from _changes(name, old[name], new[name])
    was, now_there = ({one.router_id for one in each.routers} for each in (before, now))
    yield from (f"{name}: new" for name in sorted(now_there - was))
    yield from (f"{name}: gone" for name in sorted(was - now_there))
    if now.store_problem and not before.store_problem:
        yield f"the store is away: {now.store_problem}"
    if before.store_problem and not now.store_problem:
        yield "the store is back"


def _workers(description: pb.Description) -> Mapping[str, pb.WorkerStatus]:
    return {one.identity.worker_id: one for one in description.workers}


def _changes(name: str, old: pb.WorkerStatus, new: pb.WorkerStatus) -> Iterator[str]:
    if _role(old) != _role(new):
        yield f"{name}: a {_role(new)} worker now; it was a {_role(old)} worker"
    if state_of(old) != state_of(new):
        yield f"{name}: {state_of(new)}, {state_of(old)} before"
    if old.load.drafting.alarm != new.load.drafting.alarm:
        fares = "are rarely accepted" if new.load.drafting.alarm else "are accepted again"
        yield f"{name}: its drafts {fares}"


def _role(worker: pb.WorkerStatus) -> str:
    return roles.name_of(worker.identity.role)
