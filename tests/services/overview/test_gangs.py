import io

from rich.console import Console

from baton.protos import scheduler_pb2 as pb
from baton.services.cli.status import render
from baton.services.overview.gangs import gangs_of
from baton.services.overview.workers import Workers
from baton.services.top.view import forming

READY, STARTING, DRAINING = pb.WORKER_STATE_READY, pb.WORKER_STATE_STARTING, pb.WORKER_STATE_DRAINING


def member(rank, life="one", state=READY, *, age_s=0.5, gang="d", drained=False):
    identity = pb.WorkerIdentity(worker_id=f"{gang}.r{rank}.{life}", role=pb.ROLE_DECODE)
    identity.gang.CopyFrom(pb.Gang(name=gang, rank=rank, size=3, life=life))
    load = pb.WorkerLoad(dummy_steps=rank)
    return pb.WorkerStatus(identity=identity, state=state, load=load, heartbeat_age_s=age_s, drained=drained)


def words(*members):
    (gang,) = gangs_of(members).values()
    return gang.words


def test_a_gang_is_whole_or_lacks_ranks():
    assert words(member(0), member(1), member(2)) == "d: ready"
    assert words(member(0), member(2)) == "d: forming (rank 1 is missing)"
    waiting = member(0, "", STARTING), member(2, "", STARTING)
    assert words(*waiting) == (
        "d: forming (rank 0 waits for the others, rank 1 is missing, rank 2 waits for the others)"
    )
    assert words(member(0), member(1), member(2, state=STARTING)) == "d: forming (rank 2 loads)"
    assert words(member(0), member(1), member(2, "two")) == "d: forming (its workers have not met each other)"
    assert words(member(0), member(1), member(2, state=DRAINING)) == "d: draining"
    assert words(member(0), member(1, drained=True), member(2)) == "d: drained"


def test_the_worker_that_was_heard_last_counts():
    """A predecessor stays registered for a lease."""
    dead = [member(rank, age_s=3.0) for rank in range(3)]
    assert words(*dead, *(member(rank, "two") for rank in range(3))) == "d: ready"


def test_a_ready_worker_of_a_gang_that_is_not_whole_is_forming():
    workers = Workers()
    workers.update([member(0), member(2), *(member(rank, gang="e") for rank in range(3))])
    assert [(row.state, row.gang) for row in workers.rows] == [
        ("forming", "d: forming (rank 1 is missing)"),
        ("forming", "d: forming (rank 1 is missing)"),
        *[("ready", "e: ready")] * 3,
    ]


def test_status_and_top_show_them():
    seen = [member(0), member(2), *(member(rank, gang="e") for rank in range(3))]
    console = Console(width=200, file=io.StringIO())
    console.print(render(pb.Description(workers=seen), 200))
    rows = [line.replace("│", " ").split() for line in console.file.getvalue().splitlines()]
    assert ["e", "decode", "ready", "3", "of", "3", "-", "3", "one"] in rows
    assert ["d", "decode", "forming", "2", "of", "3", "rank", "1", "is", "missing", "2", "one"] in rows
    assert forming(seen) == "d: forming (rank 1 is missing)"
