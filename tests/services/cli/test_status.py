import asyncio
import io
import json

import pytest
from rich.console import Console

from baton.attempts import image_id
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.services.cli.status import render, run_status
from baton.services.cli.tables import UNLIMITED
from baton.services.config import SchedulerSettings
from harness.support import free_port


def worker(name, role, method="", **drafting):
    load = pb.WorkerLoad(drafting=pb.Drafting(**drafting) if method else None)
    capacity = pb.Capacity(num_blocks=10, speculative_method=method)
    return pb.WorkerStatus(
        identity=pb.WorkerIdentity(worker_id=name, role=role, capacity=capacity),
        state=pb.WORKER_STATE_READY,
        load=load,
    )


def printed(description, width=160):
    console = Console(width=UNLIMITED, file=io.StringIO(), highlight=False)
    console.print(render(description, width))
    return console.file.getvalue().splitlines()


def shown(*workers, **more):
    return printed(pb.Description(topic="t", store="memory", workers=workers, **more))


def test_each_worker_that_drafts_has_a_line():
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
    assert of["decode-2"] == ["decode-2", "mtp", "LOW", "ACCEPTANCE", "3", "0", "-", "-"]
    assert "prefill-1" not in of
    assert not any("speculation" in line for line in shown(worker("decode-1", pb.ROLE_DECODE)))


def test_encode_workers_have_a_table_of_embeddings_and_no_blocks():
    one = worker("encode-0", pb.ROLE_ENCODE)
    kept = pb.Embeddings(images=3, bytes=5 << 20, capacity=64 << 20, computed=7, found=2)
    one.load.embeddings.CopyFrom(kept)
    lines = shown(one, worker("prefill-0", pb.ROLE_PREFILL))
    blocks, kept = (line.split() for line in lines if "encode-0" in line)
    assert blocks[:6] == ["encode-0", "encode", "ready", "0", "0", "-"]
    assert kept == ["encode-0", "3", "5.0", "64", "7", "2"]
    assert not any("embeddings" in line for line in shown(worker("prefill-0", pb.ROLE_PREFILL)))


def test_images_are_no_requests():
    ids = ("a", image_id("a", 0), image_id("a", 1), "b/i", "i1")
    attempts = [pb.LiveAttempt(attempt=pb.Attempt(request_id=one)) for one in ids]
    assert "3 requests in flight" in shown(attempts=attempts)[0]


def test_each_of_several_schedulers_gets_the_message():
    told = [
        pb.SchedulerStatus(address="a:7400", placements=12),
        pb.SchedulerStatus(address="b:7400", placements=7, store_problem="redis is down"),
    ]
    lines = shown(schedulers=told)
    assert "placements by scheduler, since each began: a:7400 12, b:7400 7 WITHOUT ITS STORE" in lines
    assert not any("by scheduler" in line for line in shown(schedulers=told[:1]))


def test_drained_workers_are_listed_even_if_not_running():
    held = worker("decode-1.77", pb.ROLE_DECODE)
    held.identity.name, held.state, held.drained = "decode-1", pb.WORKER_STATE_DRAINING, True
    lines = shown(held, drained=["decode-1", "prefill-9"])
    assert "drained and not running: prefill-9" in lines
    assert next(line.split()[2] for line in lines if "decode-1.77" in line) == "drained"
    assert not any("drained" in line for line in shown(worker("decode-1", pb.ROLE_DECODE)))


def test_an_unreachable_store_is_reported():
    problem = "redis at 127.0.0.1:6379 does not answer"
    assert any("STORE IS UNREACHABLE" in line and problem in line for line in shown(store_problem=problem))
    assert not any("STORE" in line for line in shown())


def large_deployment(prefill, decode):
    """Describe twenty workers and ten requests with figures as long as they get."""
    drafting = pb.Drafting(draft_length=10, drafts=99_999, first_acceptance=1, mean_accepted_length=10.5)
    load = pb.WorkerLoad(running=64, waiting=128, free_blocks=120_000, pinned_bytes=512 << 20)
    load.drafting.CopyFrom(drafting)
    capacity = pb.Capacity(num_blocks=120_000, speculative_method="mtp+suffix")
    reserved = {"reserved_prompt_tokens": 32_768, "reserved_requests": 128, "heartbeat_age_s": 12.3}
    cost = pb.Cost(transport="shm", prompt_tokens=32_768, output_tokens=32_768, handoff_bytes=4 << 30)
    cost.prefill_ms, cost.handoff_ms, cost.decode_ms = 12_345.6, 1_234.5, 123_456
    described = pb.Description(topic="t", store="memory")
    for n in range(10):
        ids = f"{prefill}{n:02}", f"{decode}{n:02}"
        for name, role in zip(ids, (pb.ROLE_PREFILL, pb.ROLE_DECODE), strict=True):
            identity = pb.WorkerIdentity(worker_id=name, role=role, capacity=capacity)
            described.workers.add(identity=identity, state=pb.WORKER_STATE_DRAINING, load=load, **reserved)
        past = described.handoffs.add(outcome="cancelled", cost=cost, age_s=999)
        past.prefill_worker_id, past.decode_worker_id = ids
    described.workers[3].load.drafting.alarm = True
    return described


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize(
    "names",
    [("prefill-0.90", "decode-0.90"), ("prefill-some-long-hostname-123", "decode-some-long-hostname-123")],
)
def test_ids_and_cells_are_whole_at_any_width(width, names):
    description = large_deployment(*names)
    lines = printed(description, width)
    assert max(map(len, lines[2:])) <= width
    text = "\n".join(lines)
    assert "…" not in text
    assert "..." not in text
    for worker in description.workers:
        assert f" {worker.identity.worker_id} " in text
        assert " draining " in text
    assert text.count("cancelled") == 10
    if width == 160:
        for title in ("heartbeat", "queued", "placed", "pinned", "handoff", "transport"):
            assert title in text


def test_an_id_wider_than_the_terminal_is_whole():
    name = "prefill-" + "long" * 20 + "."
    assert any(f" {name}00 " in line for line in printed(large_deployment(name, name), 60))


async def test_a_scheduler_that_is_gone_is_passed_over(capsys):
    async with SchedulerServer(SchedulerSettings(address="127.0.0.1:0", topic="second")) as server:
        both = f"127.0.0.1:{free_port()},{server.address}"
        await asyncio.to_thread(run_status, {"": both}, as_json=True, watch=False)
    assert json.loads(capsys.readouterr().out)["topic"] == "second"


async def test_each_model_is_shown_also_beside_one_whose_scheduler_is_gone(capsys):
    async with SchedulerServer(SchedulerSettings(address="127.0.0.1:0", topic="baton.code")) as server:
        addresses = {"chat": f"127.0.0.1:{free_port()}", "code": server.address}
        await asyncio.to_thread(run_status, addresses, as_json=True, watch=False)
        found = json.loads(capsys.readouterr().out)["models"]
        assert (found["code"]["topic"], list(found["chat"])) == ("baton.code", ["problem"])
        await asyncio.to_thread(run_status, addresses, as_json=False, watch=False)
        printed = capsys.readouterr().out
    assert "model chat: NO ANSWER" in printed
    assert "topic baton.code" in printed
    with pytest.raises(SchedulerUnavailable):
        await asyncio.to_thread(run_status, addresses, as_json=False, watch=False)
