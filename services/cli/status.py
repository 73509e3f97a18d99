"""Operators' commands to a running scheduler: `baton status`, `drain`, `undrain`, `role`, `log-level`."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from baton.attempts import is_image
from baton.enums import role_name
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerUnavailable
from baton.scheduler.types import place_of
from baton.services.cli.tables import UNLIMITED, Column, fitted, needed
from baton.services.errors import ServiceError
from baton.services.overview.commands import Kind, act, first_answer
from baton.services.overview.workers import Gang, gangs_of, state_of

T = TypeVar("T")
WATCH_S = 1.0
SHOWN_HANDOFFS = 10
_AFTER: dict[Kind, str] = {
    "drain": ": it takes no new requests and exits when it has finished; started again under the same name "
    "(--worker-id), it stays drained until `baton undrain`",
    "undrain": " as soon as it is ready",
    "role": "; its running requests finish as they were placed",
}
PIPE_WIDTH = 200  # columns


def run_status(addresses: Mapping[str, str], *, as_json: bool, watch: bool) -> None:
    """Print the state of each model, once or every second. Raises SchedulerUnavailable.

    `addresses`: the schedulers' addresses by model.
    """
    if as_json:
        found = {name: _as_json(one) for name, one in describe_all(addresses).items()}
        print(json.dumps(found.get("", {"models": found}), indent=2))
    elif not watch:
        _print(addresses)
    elif _can_be_painted_over():
        # "visible": tables taller than the terminal are printed whole.
        with Live(auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(_rendered(addresses, live.console.width), refresh=True)
                time.sleep(WATCH_S)
    else:
        while True:
            _print(addresses)
            time.sleep(WATCH_S)


def _as_json(found: pb.Description | SchedulerUnavailable) -> dict[str, Any]:
    if isinstance(found, SchedulerUnavailable):
        return {"problem": str(found)}
    return MessageToDict(found, preserving_proto_field_name=True)


def _rendered(addresses: Mapping[str, str], width: int) -> Group:
    parts: list[Group | str] = []
    for name, found in describe_all(addresses).items():
        if isinstance(found, SchedulerUnavailable):
            parts.append(f"model {name}: NO ANSWER: {found}\n")
        else:
            parts.append(render(found, width))
    return Group(*parts)


def _print(addresses: Mapping[str, str]) -> None:
    # A pipe has no width: every column is printed.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    # Unlimited, so that a long id is wrapped by the terminal instead of cut.
    Console(width=UNLIMITED, highlight=False).print(_rendered(addresses, width))
    sys.stdout.flush()


def _can_be_painted_over() -> bool:
    """Return whether the output is a terminal with a cursor: not a pipe, a file, or TERM=dumb."""
    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


def run_action(address: str, kind: Kind, worker: str, role: str = "") -> None:
    """Act on a worker and print what it does now. Raises ActionRefused unless exactly one matches."""
    print(_ask(address, lambda client: act(client, kind, worker, role)) + _AFTER[kind])


def render(description: pb.Description, width: int) -> Group:
    """Lay out the tables of workers, speculation and last requests for `width` columns."""
    in_flight = sum(not is_image(one.attempt.request_id) for one in description.attempts)
    models = sorted({worker.identity.model for worker in description.workers})
    head = (
        f"model {', '.join(models) or '(no worker)'}, topic {description.topic}, store {description.store}, "
        f"{in_flight} requests in flight\n"
    )
    if len(description.schedulers) > 1:
        shares = (
            f"{one.address} {one.placements}{' WITHOUT ITS STORE' if one.store_problem else ''}"
            for one in description.schedulers
        )
        head += f"placements by scheduler, since each began: {', '.join(shares)}\n"
    if description.store_problem:
        head += f"THE STORE IS UNREACHABLE: {description.store_problem}\n"
    there = {place_of(worker.identity) for worker in description.workers}
    if missing := [name for name in description.drained if name not in there]:
        head += f"drained and not running: {', '.join(missing)}\n"
    gangs = gangs_of(description.workers)
    shown = [(one, gangs.get(one.identity.gang.name)) for one in description.workers]
    tables = [fitted("workers", _WORKERS, shown, width)]
    if gangs:
        tables.append(fitted("gangs", _GANGS, list(gangs.values()), width))
    drafting = [worker for worker in description.workers if worker.load.HasField("drafting")]
    if drafting:
        tables.append(fitted("speculation", _SPECULATION, drafting, width))
    if encoders := [one for one in description.workers if one.identity.role == pb.ROLE_ENCODE]:
        tables.append(fitted("embeddings", _EMBEDDINGS, encoders, width))
    tables.append(_requests(description.handoffs[:SHOWN_HANDOFFS], width))
    return Group(head, *tables)


def run_log_level(addresses: Sequence[str], process: str, level: str) -> None:
    """Change the log level of processes of all models. Raises ServiceError if either is unknown."""
    replies = [_ask(one, lambda client: client.set_log_level(process, level)) for one in addresses]
    changed = dict.fromkeys(name for reply in replies for name in reply.processes)
    if not changed:
        raise ServiceError(replies[0].problem)
    print(f"log level {level}, within a second: {', '.join(changed)}")


def describe(address: str) -> pb.Description:
    """Return a scheduler's description of the deployment. Raises SchedulerUnavailable."""
    return _ask(address, SchedulerClient.describe)


def describe_all(addresses: Mapping[str, str]) -> dict[str, pb.Description | SchedulerUnavailable]:
    """Return each model's description, or the error. Raises SchedulerUnavailable if no scheduler answers."""
    found: dict[str, pb.Description | SchedulerUnavailable] = {}
    for name, address in addresses.items():
        try:
            found[name] = describe(address)
        except SchedulerUnavailable as error:
            found[name] = error
    lost = [one for one in found.values() if isinstance(one, SchedulerUnavailable)]
    if len(lost) == len(found):
        raise lost[0]
    return found


def _ask(address: str, question: Callable[[SchedulerClient], Awaitable[T]]) -> T:
    """Ask the schedulers in turn until one answers. Raises SchedulerUnavailable if none does."""

    async def ask() -> T:
        async with SchedulerClient(address) as client:
            return await first_answer(client, question)

    return asyncio.run(ask())


def _requests(past: Sequence[pb.PastHandoff], width: int) -> Table:
    """Lay out the requests: both worker ids side by side, or stacked if the terminal is too narrow."""
    beside = fitted("last requests", [_PREFILL_WORKER, _DECODE_WORKER, *_REQUESTS], past, width)
    if needed(beside) <= width:
        return beside
    return fitted("last requests", [_BOTH_WORKERS, *_REQUESTS], past, width)


def _blocks(worker: pb.WorkerStatus) -> str:
    if worker.identity.role == pb.ROLE_ENCODE:
        return "-"
    return f"{worker.load.free_blocks}/{worker.identity.capacity.num_blocks}"


_WORKERS: list[Column[tuple[pb.WorkerStatus, Gang | None]]] = [
    Column("worker", lambda w: w[0].identity.worker_id),
    Column("role", lambda w: role_name(w[0].identity.role)),
    Column("state", lambda w: state_of(*w)),
    Column("running", lambda w: str(w[0].load.running), number=True, rank=6),
    Column("waiting", lambda w: str(w[0].load.waiting), number=True, rank=5),
    Column(
        "free\nblocks",
        lambda w: _blocks(w[0]),
        number=True,
        rank=4,
    ),
    Column("pinned\nMiB", lambda w: f"{w[0].load.pinned_bytes / 2**20:.1f}", number=True, rank=2),
    Column("queued\ntokens", lambda w: str(w[0].reserved_prompt_tokens), number=True, rank=3),
    Column("placed", lambda w: str(w[0].reserved_requests), number=True, rank=1),
    Column("heartbeat\ns ago", lambda w: f"{w[0].heartbeat_age_s:.1f}", number=True, rank=2),
]
_EMBEDDINGS: list[Column[pb.WorkerStatus]] = [
    Column("worker", lambda w: w.identity.worker_id),
    Column("images", lambda w: str(w.load.embeddings.images), number=True),
    Column("MiB", lambda w: f"{w.load.embeddings.bytes / 2**20:.1f}", number=True, rank=3),
    Column("of\nMiB", lambda w: f"{w.load.embeddings.capacity / 2**20:.0f}", number=True, rank=1),
    Column("computed", lambda w: str(w.load.embeddings.computed), number=True, rank=4),
    Column("found\nhere", lambda w: str(w.load.embeddings.found), number=True, rank=2),
]
_GANGS: list[Column[Gang]] = [
    Column("gang", lambda gang: gang.name),
    Column("role", lambda gang: role_name(gang.first.role)),
    Column("state", lambda gang: gang.state),
    Column("ranks", lambda gang: f"{len(gang.members)} of {gang.size}", number=True),
    Column("not ready", lambda gang: gang.lacks or "-", rank=3),
    Column("dummy\nsteps", lambda gang: str(gang.dummy_steps), number=True, rank=2),
    Column("life", lambda gang: gang.first.gang.life or "-", rank=1),
]
_SPECULATION: list[Column[pb.WorkerStatus]] = [
    Column("worker", lambda w: w.identity.worker_id),
    Column("method", lambda w: w.identity.capacity.speculative_method, rank=4),
    Column("alarm", lambda w: "LOW ACCEPTANCE" if w.load.drafting.alarm else "-"),
    Column("draft\nlength", lambda w: str(w.load.drafting.draft_length), number=True, rank=1),
    Column("drafts\nlast min", lambda w: str(w.load.drafting.drafts), number=True, rank=1),
    Column(
        "first position\naccepted",
        lambda w: f"{w.load.drafting.first_acceptance:.0%}" if w.load.drafting.drafts else "-",
        number=True,
        rank=3,
    ),
    Column(
        "accepted\nlength",
        lambda w: f"{w.load.drafting.mean_accepted_length:.2f}" if w.load.drafting.drafts else "-",
        number=True,
        rank=2,
    ),
]
_PREFILL_WORKER: Column[pb.PastHandoff] = Column(
    "prefill worker", lambda past: past.prefill_worker_id or past.decode_worker_id
)
_DECODE_WORKER: Column[pb.PastHandoff] = Column("decode worker", lambda past: past.decode_worker_id)
_BOTH_WORKERS: Column[pb.PastHandoff] = Column(
    "prefill worker\ndecode worker",
    lambda past: f"{past.prefill_worker_id or past.decode_worker_id}\n{past.decode_worker_id}",
)
_REQUESTS: list[Column[pb.PastHandoff]] = [
    Column("outcome", lambda past: past.outcome),
    Column("transport", lambda past: past.cost.transport or "-", rank=1),
    Column("prompt\ntokens", lambda past: str(past.cost.prompt_tokens), number=True, rank=5),
    Column("output\ntokens", lambda past: str(past.cost.output_tokens), number=True, rank=6),
    Column("KV\nMiB", lambda past: f"{past.cost.handoff_bytes / 2**20:.1f}", number=True, rank=2),
    Column("prefill\nms", lambda past: f"{past.cost.prefill_ms:.1f}", number=True, rank=4),
    Column("handoff\nms", lambda past: f"{past.cost.handoff_ms:.1f}", number=True, rank=3),
    Column("decode\nms", lambda past: f"{past.cost.decode_ms:.0f}", number=True, rank=4),
    Column("ended\ns ago", lambda past: f"{past.age_s:.0f}", number=True, rank=3),
]
