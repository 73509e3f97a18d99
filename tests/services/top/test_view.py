from baton.autoscale.histogram import SECONDS, Histogram
from baton.protos import scheduler_pb2 as pb
from baton.services.overview.workers import Workers
from baton.services.top import view
from baton.services.top.view import Seen


def worker(name, role, **load):
    return pb.WorkerStatus(
        identity=pb.WorkerIdentity(worker_id=name, role=role, capacity=pb.Capacity(num_blocks=101)),
        state=pb.WORKER_STATE_READY,
        load=pb.WorkerLoad(**{"free_blocks": 100, **load}),
    )


def router(over, tokens, first, gaps):
    load = pb.RouterLoad(over=over, output_tokens=tokens, waiting=2)
    for counts, values in ((load.first_token, first), (load.gap, gaps)):
        histogram = Histogram(SECONDS)
        for value in values:
            histogram.add(value)
        counts.extend(histogram.counts)
    return pb.RouterStatus(router_id="router-1", load=load)


def test_rates_are_of_the_time_between_two_looks():
    before = Seen(10.0, pb.Description(routers=[router(5, 100, [9.0] * 50, [0.5])]))
    after = router(11, 500, [9.0] * 50 + [0.05] * 99 + [2.0], [0.5, 0.01])
    now = Seen(12.0, pb.Description(routers=[after]))
    flow = view.traffic(now, before)
    assert (flow.requests_s, flow.tokens_s, flow.waiting) == (3.0, 200.0, 2)
    assert 0.05 / 1.25 <= flow.ttft[0] <= 0.05 * 1.25  # the old times, of nine seconds, no longer count
    assert flow.ttft[1] < 2.5
    assert 0.01 / 1.25 <= flow.itl[1] <= 0.01 * 1.25
    alone = view.traffic(now, None)
    assert (alone.requests_s, alone.ttft, alone.waiting) == (0.0, None, 2)


def test_workers_are_found_and_sorted():
    workers = Workers()
    workers.update(
        [
            worker("prefill-b", pb.ROLE_PREFILL, running=1),
            worker("decode-a", pb.ROLE_DECODE, running=9, free_blocks=10),
            worker("decode-c", pb.ROLE_DECODE, running=2, waiting=9),
        ]
    )
    found = workers.rows
    assert [row.id for row in view.chosen(found, "", "name")] == ["decode-a", "decode-c", "prefill-b"]
    assert [row.id for row in view.chosen(found, "", "load")] == ["decode-c", "decode-a", "prefill-b"]
    assert [row.id for row in view.chosen(found, "DECODE ready", "KV")] == ["decode-a", "decode-c"]
    assert view.chosen(found, "drained", "name") == []
    prefill, decode = view.sides(found)
    assert prefill.split()[:4] == ["prefill", "1", "of", "1"]
    assert "run 11    wait 9     KV 45%" in decode


def test_encode_workers_show_their_embeddings():
    workers = Workers()
    one = worker("encode-0", pb.ROLE_ENCODE, running=1)
    one.load.embeddings.CopyFrom(pb.Embeddings(images=1200, bytes=34 << 20))
    workers.update([one, worker("prefill-0", pb.ROLE_PREFILL, free_blocks=50)])
    assert [row.id for row in view.chosen(workers.rows, "", "KV")] == ["prefill-0", "encode-0"]
    _, encode = view.sides(workers.rows)
    assert encode == "encode     1 of 1    run 1     wait 0     1,200 images, 34 MiB 0 tok/s"


def test_routers_that_come_and_go_and_the_store_are_reported():
    before = pb.Description(routers=[pb.RouterStatus(router_id="router-1")])
    routers = [pb.RouterStatus(router_id="router-2")]
    now = pb.Description(routers=routers, store_problem="redis does not answer")
    assert list(view.changes(before, now)) == [
        "router-2: new",
        "router-1: gone",
        "the store is down: redis does not answer",
    ]
    assert list(view.changes(now, now)) == []
