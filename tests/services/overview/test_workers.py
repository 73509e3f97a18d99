from baton.protos import scheduler_pb2 as pb
from baton.services.overview.workers import BAD, COLUMNS, GONE, GONE_S, INFO, Row, Workers, changes
from harness.scheduling import Clock


def status(worker_id, computed=0, output=0, *, drafts=0, first=0.0, role=pb.ROLE_DECODE, drained=False):
    counts = pb.EngineCounts(computed_tokens=computed, output_tokens=output)
    drafting = pb.Drafting(drafts=drafts, first_acceptance=first, mean_accepted_length=2.5)
    load = pb.WorkerLoad(running=2, free_blocks=49, counts=counts, drafting=drafting)
    capacity = pb.Capacity(num_blocks=99, max_num_seqs=8)
    identity = pb.WorkerIdentity(worker_id=worker_id, role=role, capacity=capacity)
    return pb.WorkerStatus(identity=identity, state=pb.WORKER_STATE_READY, load=load, drained=drained)


def rows(workers):
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in workers.rows}


def test_a_row_has_rates_and_shares():
    clock = Clock()
    workers = Workers(clock)
    workers.update([status("d", 1000, 50)])
    clock.now += 2
    workers.update([status("d", 3000, 250, drafts=10, first=0.8)])
    row = rows(workers)["d"]
    assert (row["prefill_tokens_per_s"], row["output_tokens_per_s"]) == (1000, 100)
    assert row["kv_usage"] == 0.5
    assert (row["running"], row["slots"], row["acceptance"], row["accepted_length"]) == (2, 8, 0.8, 2.5)
    assert workers.sums.output_tokens_per_s == 100


def test_a_rate_lasts_until_the_next_heartbeats():
    clock = Clock()
    workers = Workers(clock)
    for computed in (0, 500, 500):
        workers.update([status("p", computed)])
        clock.now += 1
    assert rows(workers)["p"]["prefill_tokens_per_s"] == 500
    clock.now += 2
    workers.update([status("p", 500)])
    assert rows(workers)["p"]["prefill_tokens_per_s"] == 0


def test_no_rate_is_known_while_no_scheduler_answers():
    """The last snapshot's counts stand still, but the workers do not."""
    clock = Clock()
    workers = Workers(clock)

    def rates(*, fresh=True):
        nonlocal output
        output += 100 if fresh else 0
        workers.update([status("d", 0, output)], fresh=fresh)
        clock.now += 2
        return rows(workers)["d"]["output_tokens_per_s"], workers.sums.output_tokens_per_s

    output, unknown = 0, (None, None)
    assert [rates(), rates()] == [unknown, (50, 50)]
    assert [rates(fresh=False) for _ in range(3)] == [unknown] * 3
    assert [rates(), rates()] == [unknown, (50, 50)]


def test_acceptance_counts_each_worker_by_its_drafts():
    workers = Workers()
    workers.update([status("a", drafts=30, first=0.9), status("b", drafts=10, first=0.1), status("c")])
    assert workers.sums.acceptance == 0.7


def test_a_worker_that_left_is_shown_for_a_while():
    clock = Clock()
    workers = Workers(clock)
    workers.update([status("a"), status("b")])
    workers.update([status("a")])
    assert (rows(workers)["b"]["state"], list(rows(workers))) == (GONE, ["a", "b"])
    workers.update([status("a"), status("b", drained=True)])  # it comes back
    assert rows(workers)["b"]["state"] == "drained"
    workers.update([status("a")])
    assert rows(workers)["b"]["state"] == GONE
    clock.now += GONE_S
    workers.update([status("a")])
    assert list(rows(workers)) == ["a"]


def test_an_encode_worker_has_embeddings_and_no_kv():
    clock = Clock()
    workers = Workers(clock)
    for computed in (0, 300):
        one = status("e", computed, role=pb.ROLE_ENCODE)
        one.load.embeddings.CopyFrom(pb.Embeddings(images=3, bytes=5 << 20, computed=7, found=2))
        workers.update([one, status("p", 2 * computed)])
        clock.now += 1
    row = rows(workers)["e"]
    assert (row["role"], row["kv_usage"], row["kept"]) == ("encode", None, (3, 5.0, 7, 2))
    assert row["prefill_tokens_per_s"] == 300
    assert workers.sums.prefill_tokens_per_s == 600  # images are not prompts
    assert rows(workers)["p"]["kept"] is None


def row(worker_id, **values):
    usual = {"id": worker_id, "name": worker_id, "role": "decode", "state": "ready", "alarm": False}
    return Row(**{**dict.fromkeys(Row._fields), **usual, **values})


def told(before, now):
    return list(changes({one.id: one for one in before}, {one.id: one for one in now}))


def test_workers_come_change_and_go():
    a, flipped, b = row("a"), row("a", role="prefill"), row("b", state="starting")
    assert told([a], [a, b]) == [(INFO, "b registered")]
    assert told([a, b], [flipped, row("b")]) == [
        (INFO, "a: role decode → prefill"),
        (INFO, "b: state starting → ready"),
    ]
    gone = row("a", role="prefill", state="gone")
    assert (told([flipped], [gone]), told([gone], [gone])) == ([(BAD, "a is gone")], [])


def test_many_at_once_are_one_line():
    new = [row(f"w{number}") for number in range(9)]
    assert told([], new) == [(INFO, "w0, w1, w2, w3, w4 and 4 more registered")]


def test_an_alarm_is_raised_and_cleared():
    calm, alarmed = row("a"), row("a", alarm=True)
    assert [severity for severity, _ in told([calm], [alarmed]) + told([alarmed], [calm])] == [BAD, INFO]
