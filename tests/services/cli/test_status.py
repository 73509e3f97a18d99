from __future__ import annotations

import io

from rich.console import Console

from baton.protos import scheduler_pb2 as pb
from baton.services.cli.status import render


def worker(name: str, role: pb.Role, method: str = "", **drafting: float) -> pb.WorkerStatus:
    load = pb.WorkerLoad(drafting=pb.Drafting(**drafting) if method else None)
    capacity = pb.Capacity(num_blocks=10, speculative_method=method)
    return pb.WorkerStatus(
        identity=pb.WorkerIdentity(worker_id=name, role=role, capacity=capacity),
        state=pb.WORKER_STATE_READY,
        load=load,
    )


def shown(*workers: pb.WorkerStatus, store_problem: str = "") -> list[str]:
    console = Console(width=160, file=io.StringIO())
    told = pb.Description(topic="t", store="memory", workers=workers, store_problem=store_problem)
    console.print(render(told))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_each_worker_that_drafts_has_a_line() -> None:
    figures = {"draft_length": 3, "drafts": 120, "first_acceptance": 0.625, "mean_accepted_length": 2.5}
    lines = shown(
        worker("prefill-1", pb.ROLE_PREFILL),
        worker("decode-1", pb.ROLE_DECODE, "mtp", **figures),
        worker("decode-2", pb.ROLE_DECODE, "mtp", draft_length=3, alarm=True),
    )
    begin = next(number for number, line in enumerate(lines) if line.startswith("speculation"))
    end = next(number for number, line in enumerate(lines) if line.startswith("last requests"))
    rows = lines[begin:end]
    of = {row.split()[0]: row.split() for row in rows if row.strip()}
    assert of["decode-1"] == ["decode-1", "mtp", "-", "3", "120", "62%", "2.50"]
    assert of["decode-2"] == ["decode-2", "mtp", "ACCEPTED", "TOO", "SELDOM", "3", "0", "-", "-"]
    assert "prefill-1" not in of


def test_without_speculation_nothing_is_said_of_it() -> None:
    assert not any("speculation" in line for line in shown(worker("decode-1", pb.ROLE_DECODE)))


def test_a_store_that_is_away_is_told() -> None:
    problem = "redis at 127.0.0.1:6379 does not answer"
    assert any("STORE IS AWAY" in line and problem in line for line in shown(store_problem=problem))
    assert not any("STORE" in line for line in shown())
