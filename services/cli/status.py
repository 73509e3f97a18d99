"""`baton status`, `baton drain` and `baton role`: what an operator asks the scheduler."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import cast

from google.protobuf.json_format import MessageToDict
from rich import box
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
        # A pipe has no width: do not cut the tables there.
        width = None if sys.stdout.isatty() else 160
        Console(width=width).print(render(_describe(settings.address)))


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


def run_role(settings: SchedulerSettings, worker: str, to: str) -> None:
    """Give one worker another role. Raises ServiceError when it does not take it."""

    async def ask() -> pb.SetRoleReply:
        async with SchedulerClient(settings.address) as client:
            return await client.set_role(worker, cast(pb.Role, pb.Role.Value(f"ROLE_{to.upper()}")))

    reply = asyncio.run(ask())
    if not reply.worker_id:
        raise ServiceError(reply.problem)
    print(f"{reply.worker_id} is a {to} worker now; what it runs goes on to its end")


def render(description: pb.Description) -> Group:
    """The tables: workers, placements under way, last handoffs."""
    under_way = len(description.attempts)
    models = sorted({worker.identity.model for worker in description.workers})
    head = (
        f"model {', '.join(models) or '(no worker)'}, topic {description.topic}, store {description.store}, "
        f"{under_way} requests under way\n"
    )
    if description.store_problem:
        head += f"THE STORE IS AWAY, going on from memory: {description.store_problem}\n"
    tables = [_workers(description), _handoffs(description)]
    if any(worker.load.HasField("drafting") for worker in description.workers):
        tables.insert(1, _drafting(description))
    return Group(head, *tables)


def _describe(address: str) -> pb.Description:
    async def ask() -> pb.Description:
        client = SchedulerClient(address)
        try:
            return await client.describe()
        finally:
            await client.close()

    return asyncio.run(ask())


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in texts:
        table.add_column(column, no_wrap=True, vertical="bottom")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _workers(description: pb.Description) -> Table:
    numbers = (
        "running",
        "waiting",
        "free\nblocks",
        "pinned\nMiB",
        "unread\ntokens",
        "placed",
        "heard\nof, s",
    )
    table = _table("workers", ("worker", "role", "state"), numbers)
    for worker in description.workers:
        load = worker.load
        table.add_row(
            worker.identity.worker_id,
            pb.Role.Name(worker.identity.role).removeprefix("ROLE_").lower(),
            pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower(),
            str(load.running),
            str(load.waiting),
            f"{load.free_blocks}/{worker.identity.capacity.num_blocks}",
            f"{load.pinned_bytes / 2**20:.1f}",
            str(worker.reserved_prompt_tokens),
            str(worker.reserved_requests),
            f"{worker.heartbeat_age_s:.1f}",
        )
    return table


def _drafting(description: pb.Description) -> Table:
    numbers = (
        "draft\nlength",
        "drafts\nlast min",
        "first token\naccepted",
        "tokens\na step",
    )
    table = _table("speculation", ("worker", "method", "alarm"), numbers)
    for worker in description.workers:
        load = worker.load
        if not load.HasField("drafting"):
            continue
        drafting = load.drafting
        table.add_row(
            worker.identity.worker_id,
            worker.identity.capacity.speculative_method,
            "ACCEPTED TOO SELDOM" if drafting.alarm else "-",
            str(drafting.draft_length),
            str(drafting.drafts),
            f"{drafting.first_acceptance:.0%}" if drafting.drafts else "-",
            f"{drafting.mean_accepted_length:.2f}" if drafting.drafts else "-",
        )
    return table


def _handoffs(description: pb.Description) -> Table:
    numbers = (
        "tokens\nin",
        "\nout",
        "KV\nMiB",
        "first\ntoken ms",
        "handoff\nms",
        "decode\nms",
        "ended\ns ago",
    )
    table = _table("last requests", ("prompt read by", "answer written by", "outcome", "by"), numbers)
    for past in description.handoffs[:SHOWN_HANDOFFS]:
        cost = past.cost
        table.add_row(
            past.prefill_worker_id or past.decode_worker_id,
            past.decode_worker_id,
            past.outcome,
            cost.transport or "-",
            str(cost.prompt_tokens),
            str(cost.output_tokens),
            f"{cost.handoff_bytes / 2**20:.1f}",
            f"{cost.prefill_ms:.1f}",
            f"{cost.handoff_ms:.1f}",
            f"{cost.decode_ms:.0f}",
            f"{past.age_s:.0f}",
        )
    return table
