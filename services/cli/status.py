"""`baton status` and `baton drain`: what an operator asks the scheduler."""

from __future__ import annotations

import asyncio
import json
import time

from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.services.config import SchedulerSettings
from baton.services.errors import ServiceError

WATCH_S = 1.0
SHOWN_HANDOFFS = 10


def run_status(settings: SchedulerSettings, *, as_json: bool, watch: bool) -> None:
    """Print the deployment's state once, or every second. Raises SchedulerUnavailable."""
    if as_json:
        print(
            json.dumps(MessageToDict(_describe(settings.address), preserving_proto_field_name=True), indent=2)
        )
    elif watch:
        with Live(render(_describe(settings.address)), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_S)
                live.update(render(_describe(settings.address)), refresh=True)
    else:
        Console().print(render(_describe(settings.address)))


def run_drain(settings: SchedulerSettings, worker: str) -> None:
    """Ask one worker to drain. Raises ServiceError when no single worker is meant."""

    async def ask() -> pb.DrainReply:
        client = SchedulerClient(settings.address)
        try:
            return await client.drain(worker)
        finally:
            await client.close()

    reply = asyncio.run(ask())
    if not reply.worker_id:
        raise ServiceError(reply.problem)
    print(f"{reply.worker_id} drains: it takes nothing new and exits when it has finished")


def render(description: pb.Description) -> Group:
    """The tables: workers, placements under way, last handoffs."""
    under_way = len(description.attempts)
    head = f"topic {description.topic}, store {description.store}, {under_way} requests under way"
    return Group(head, _workers(description), _handoffs(description))


def _describe(address: str) -> pb.Description:
    async def ask() -> pb.Description:
        client = SchedulerClient(address)
        try:
            return await client.describe()
        finally:
            await client.close()

    return asyncio.run(ask())


def _workers(description: pb.Description) -> Table:
    table = Table(title="workers", title_justify="left")
    for column in ("worker", "role", "state", "model"):
        table.add_column(column, no_wrap=True)
    for column in (
        "running",
        "waiting",
        "free blocks",
        "pinned KV",
        "prompt tokens queued",
        "placed",
        "heard of",
    ):
        table.add_column(column, justify="right")
    for worker in description.workers:
        load = worker.load
        table.add_row(
            worker.identity.worker_id,
            pb.Role.Name(worker.identity.role).removeprefix("ROLE_").lower(),
            pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower(),
            worker.identity.model,
            str(load.running),
            str(load.waiting),
            f"{load.free_blocks}/{worker.identity.capacity.num_blocks}",
            f"{load.pinned_handoffs} ({load.pinned_bytes / 2**20:.1f} MiB)",
            str(worker.reserved_prompt_tokens),
            str(worker.reserved_requests),
            f"{worker.heartbeat_age_s:.1f} s ago",
        )
    return table


def _handoffs(description: pb.Description) -> Table:
    table = Table(title="last requests", title_justify="left")
    for column in ("request", "prompt read by", "answer written by", "outcome", "by"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens in", "out", "KV MiB", "first token ms", "handoff ms", "decode ms", "ended"):
        table.add_column(column, justify="right")
    for past in description.handoffs[:SHOWN_HANDOFFS]:
        cost = past.cost
        table.add_row(
            past.attempt.request_id[-14:],
            past.prefill_worker_id or past.decode_worker_id,
            past.decode_worker_id,
            past.outcome,
            cost.transport or "-",
            str(cost.prompt_tokens),
            str(cost.output_tokens),
            f"{cost.handoff_bytes / 2**20:.1f}",
            f"{cost.prefill_ms:.1f}",
            f"{cost.handoff_ms:.1f}",
            f"{cost.decode_ms:.1f}",
            f"{past.age_s:.0f} s ago",
        )
    return table
