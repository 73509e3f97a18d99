"""Checks of a running deployment: machines, versions, clocks, and the speed of KV between workers.

The checks go through the scheduler, so workers need not be reachable from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from baton import facts, machine
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.diagnosis.finding import About, Finding
from baton.services.diagnosis.local import HERE
from baton.services.diagnosis.machine import Needs, judge

AT_ONCE = 16  # concurrent calls to workers
CLOCK_ASKS = 5
SKEW_WARNING_S = 1.0  # logs are hard to read
SKEW_WRONG_S = 60.0  # certificates and tokens may be refused
TRIAL_BYTES = 16 << 20  # per rank
MAX_TRIALS = 32
TRIALS_S = 120.0  # all trials together
SLOW_MB_S = 100.0  # about 1 Gbit/s: KV of 1,000 tokens of an 8 B model takes over a second
_MUST_MATCH = {"vllm": "routers refuse workers of another vLLM"}
_PUTS_OUT = (pb.ROLE_PREFILL, pb.ROLE_MIXED)
_TAKES_IN = (pb.ROLE_DECODE, pb.ROLE_MIXED)


async def findings(
    client: SchedulerClient, needs: Needs, description: pb.Description
) -> AsyncIterator[Finding]:
    """Yield findings on the deployment. `needs` are those of a running worker."""
    for one in _state(description):
        yield one
    yield await _clock(client)
    scheduler = (await client.inspect()).inspection
    workers = {one.identity.worker_id: one for one in description.workers}
    asked = await _inspect_all(client, list(workers))
    for name, reply in asked.items():
        if reply.problem:
            cure = "see its log, and check that the scheduler can reach its address"
            yield About("workers", name).wrong(reply.problem, cure)
    answers = {name: reply for name, reply in asked.items() if not reply.problem}
    for name, reply in answers.items():
        yield _skew(name, reply.clock_ahead_s, reply.asked_s, "the scheduler's")
    versions = {name: dict(reply.inspection.versions) for name, reply in answers.items()}
    for one in _versions({HERE: machine.versions(), "scheduler": dict(scheduler.versions)} | versions):
        yield one
    for name, reply in answers.items():
        seen = reply.inspection
        for one in judge(name, seen.machine, seen.versions.get("torch", ""), needs):
            yield one
    async for one in _trials(client, list(workers.values())):
        yield one


def _state(description: pb.Description) -> Iterator[Finding]:
    ready = [one for one in description.workers if one.state == pb.WORKER_STATE_READY]
    scheduler, routers = About("scheduler", "scheduler"), len(description.routers)
    workers = f"{len(ready)} of {len(description.workers)} workers ready"
    what = f"topic {description.topic!r}: {workers}, {routers} routers"
    if description.store_problem:
        yield scheduler.wrong(f"its store is unreachable: {description.store_problem}", "fix its store")
    if not ready:
        yield scheduler.wrong(what, "start workers, or see their logs")
    elif not routers:
        yield scheduler.warning(f"{what}: clients are not served", "start a router, or see its log")
    else:
        yield scheduler.ok(what)
    for worker in (one for one in ready if one.load.drafting.alarm):
        cure = "docs/observability.md, a silent drafter"
        yield About("workers", worker.identity.worker_id).warning("its drafts are rarely accepted", cure)


# ---- clocks


async def _clock(client: SchedulerClient) -> Finding:
    """Compare this clock with the scheduler's, by the fastest of several calls (Cristian's algorithm)."""
    asked = []
    for _ in range(CLOCK_ASKS):
        began, began_unix = time.monotonic(), time.time()
        there = await client.clock()
        took = time.monotonic() - began
        asked.append((took, there - (began_unix + took / 2)))
    took, ahead = min(asked)
    return _skew("scheduler", ahead, took, "this machine's")


def _skew(subject: str, ahead_s: float, took_s: float, whose: str) -> Finding:
    clock, cure = About("clock", subject), "run NTP on both machines"
    direction = "ahead of" if ahead_s > 0 else "behind"
    what = (
        f"{abs(ahead_s) * 1e3:.1f} ms {direction} {whose}, to within {took_s / 2 * 1e3:.1f} ms "
        "(half the time of a call)"
    )
    surely = max(0.0, abs(ahead_s) - took_s / 2)
    if surely > SKEW_WRONG_S:
        return clock.wrong(f"{what}: certificates and tokens are refused", cure)
    if surely > SKEW_WARNING_S:
        return clock.warning(f"{what}: logs do not line up", cure)
    return clock.ok(what)


# ---- versions


async def _inspect_all(client: SchedulerClient, names: Sequence[str]) -> Mapping[str, pb.InspectReply]:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> pb.InspectReply:
        async with turns:
            try:
                return await client.inspect(name)
            except SchedulerError as error:
                return pb.InspectReply(problem=str(error))

    return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


def _versions(found: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    for program in dict.fromkeys(name for versions in found.values() for name in versions):
        about, cure = About("versions", program), "install one version everywhere"
        having: dict[str, list[str]] = {}
        for process, versions in found.items():
            if version := versions.get(program):  # a scheduler may lack torch
                having.setdefault(version, []).append(process)
        if len(having) == 1:
            version, processes = next(iter(having.items()))
            yield about.ok(f"{version} on all {len(processes)} that have it")
            continue
        who = "; ".join(f"{version}: {_some(processes)}" for version, processes in having.items())
        here_alone = all(processes == [HERE] or HERE not in processes for processes in having.values())
        others = sum(HERE not in processes for processes in having.values())
        if program in _MUST_MATCH and not (here_alone and others == 1):
            yield about.wrong(f"{who}: {_MUST_MATCH[program]}", cure)
        else:
            yield about.warning(f"{who}: not tested together", cure)


def _some(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


# ---- handoffs


def pairs(workers: Sequence[pb.WorkerStatus]) -> list[tuple[pb.WorkerStatus, pb.WorkerStatus]]:
    """Return the pairs of workers between which KV is handed over."""
    able = [one for one in workers if one.state == pb.WORKER_STATE_READY and one.identity.capacity.transports]
    return [
        (source, puller)
        for source in able
        for puller in able
        if source.identity.role in _PUTS_OUT
        and puller.identity.role in _TAKES_IN
        and source.identity.worker_id != puller.identity.worker_id
    ]


async def _trials(client: SchedulerClient, workers: Sequence[pb.WorkerStatus]) -> AsyncIterator[Finding]:
    found = pairs(workers)
    step = max(1, -(-len(found) // MAX_TRIALS))
    deadline = time.monotonic() + TRIALS_S
    tried = 0
    for source, puller in found[::step]:
        if time.monotonic() > deadline:
            break
        tried += 1
        async for one in _pair(client, source, puller):
            yield one
    if tried < len(found):
        what = f"{tried} of {len(found)} pairs were tried, one after the other"
        yield About("handoff", "deployment").ok(what)


async def _pair(
    client: SchedulerClient, source: pb.WorkerStatus, puller: pb.WorkerStatus
) -> AsyncIterator[Finding]:
    one, other = source.identity, puller.identity
    between = About("handoff", f"{one.worker_id} -> {other.worker_id}")
    sides = f"on {one.worker_id}", f"on {other.worker_id}"
    there, here = ((each.capacity.compatibility_hash, each.capacity.facts) for each in (one, other))
    if why := facts.unlike(there, here, sides):
        yield between.wrong(f"their KV is incompatible: {why}", "configure both the same way")
        return
    common = [name for name in one.capacity.transports if name in other.capacity.transports]
    tried = [name for name in common if name != "shm" or one.host == other.host]
    if not tried:
        cure = "add tcp to handoff.transports of both"
        yield between.wrong("no common transport works between them", cure)
    for name in tried:
        try:
            reply = await client.try_handoff(one.worker_id, other.worker_id, name, TRIAL_BYTES)
        except SchedulerError as error:
            reply = pb.TryHandoffReply(problem=str(error))
        yield _measured(between, name, reply)


def _measured(between: About, transport: str, reply: pb.TryHandoffReply) -> Finding:
    if reply.problem:
        cure = "see both workers' logs and docs/clusters.md (who needs which port open)"
        return between.wrong(f"{transport}: {reply.problem}", cure)
    speed = reply.bytes / max(reply.seconds, 1e-9) / 1e6
    what = f"{transport}: {speed:,.0f} MB/s ({reply.bytes / 1e6:.1f} MB in {reply.seconds * 1e3:.1f} ms)"
    if speed < SLOW_MB_S:
        cure = "check the network between them, and how busy they are"
        return between.warning(f"{what}: long prompts will wait for their KV", cure)
    return between.ok(what)
