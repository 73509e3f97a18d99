import asyncio
import json
import os
from collections import Counter

import pytest

from bench import gpu_answers, gpu_loads, gpu_serve
from bench.gpu_answers import ARMS, ENGINE, arm, differences
from bench.gpu_fleet import Served, blamed, drafts, handoffs, serving, stages
from bench.gpu_loads import ANSWER, closed_loops, figures_of
from bench.light import Reply
from harness import stats

STILL = (
    "  [ 10.1 s] still     waiting for shm-decode-0, one-mtp-mixed-0, router; shm-decode-0 said last (x): y\n"
    "  [ 20.1 s] still     waiting for one-mtp-mixed-0, router\n"
)


def test_arms_to_blame_for_a_failed_start():
    assert blamed(STILL) == {"one-mtp"}
    assert blamed(f"{STILL}error: shm-prefill-0 could not start: no memory") == {"shm"}
    assert blamed("Baton 0.1.0: model one\n") == set()


def test_answers_differ_where_the_first_token_does():
    reference = [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert differences(reference, reference) == []
    found = differences([[1, 9, 9], [], [7, 8]], reference)
    assert found == [{"prompt": 0, "at": 1, "token": 9, "reference": 2}]


def test_differences_of_two_scrapes():
    before = Counter({"handoffs_loaded_total shm": 3, "handoff_bytes_total shm": 2**20})
    before |= Counter({"handoff_move_seconds_sum": 1, "handoff_move_seconds_count": 3})
    after = Counter({"handoffs_loaded_total shm": 5, "handoff_bytes_total shm": 3 * 2**20})
    after |= Counter({"handoff_move_seconds_sum": 2, "handoff_move_seconds_count": 5})
    assert handoffs(before, after) == {"loaded": {"shm": 2}, "mib": 2.0, "move_ms": 500.0}
    assert handoffs(after, after) == {}
    counts = Counter({"drafted_tokens_total": 9, "accepted_tokens_total": 4})
    assert drafts(Counter(), counts) == {"drafted": 9, "accepted": 4}
    assert drafts(counts, counts) == {}
    routers = Counter({"move seconds_count": 2, "move seconds_sum": 0.5, "wait seconds_count": 0})
    assert stages(Counter(), routers) == {"move": 250.0}


def test_a_closed_loop_counts_tokens_within_its_time():
    early = Reply(0.0, status=200, arrivals=[1.0, 2.0], whole=True)  # half of its tokens arrive in time
    counted = Reply(1.5, status=200, arrivals=[1.6, 1.7, 1.9, 2.9], whole=True)
    failed = Reply(1.6, status=200)
    found = figures_of([early, counted, failed], first=1.5, last=2.5)
    assert found["tokens_per_s"] == pytest.approx(ANSWER * (1 / 2 + 3 / 4))
    assert found["ttft_p50_ms"] == pytest.approx(100)
    assert found["itl_max_ms"] == pytest.approx(1000)
    assert (found["answers"], found["failed"]) == (1, 1)
    with pytest.raises(RuntimeError, match="none of 1 answers was complete"):
        figures_of([failed], first=0, last=1)


def test_a_part_that_is_run_alone_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "RESULTS", tmp_path)
    served = Served(None, [], {"b": "no memory"}, 3.0)
    gpu_serve.Results("r").fail(["load"], "1.7", "no memory")
    assert json.loads((tmp_path / "r.json").read_text())["failures"].keys() == {"load of 1.7B"}
    gpu_serve.Results("r").keep("1.7", "load", served, {"arms": 1})
    gpu_serve.Results("r").keep("8", "load", served, {"arms": 2})
    gpu_serve.Results("r").keep("", "answers", served, {"arms": 3})
    found = json.loads((tmp_path / "r.json").read_text())
    assert [found["load"]["1.7"]["arms"], found["load"]["8"]["arms"], found["answers"]["arms"]] == [1, 2, 3]
    assert found["failures"] == {}
    assert found["answers"]["failed"] == {"b": "no memory"}
    assert {"command", "when"} <= set(found["answers"]["taken"])


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: starts four engines")
def test_an_arm_that_cannot_start_is_left_out_and_the_others_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_loads, "CLIENTS", 2)
    monkeypatch.setattr(gpu_loads, "EACH", 2)  # so that both processes have clients
    lacking = arm(pair=False)
    lacking["engine"]["kv_cache_gib"] = 9000
    arms = {"one": ARMS["one"], "lacking": lacking, "shm": ARMS["shm"]}
    kept = []
    with serving(tmp_path, arms, ENGINE, 120, cold=False, ops={"listen": ""}) as served:
        assert served.arms == ["one", "shm"]
        assert "9000" in served.failed["lacking"]
        asyncio.run(gpu_answers.compare(served, 4, lambda found: kept.append(json.loads(json.dumps(found)))))
        loops = []
        closed_loops(served, ["shm"], [1, 4], 1.5, lambda found: loops.append(json.loads(json.dumps(found))))
    found, many = kept[-1]["arms"], len(gpu_answers.PROMPTS)
    assert {name: one["equal"] for name, one in found.items()} == {"one": many, "shm": many}
    # A busy machine may recompute a prompt.
    assert many - 2 <= found["shm"]["handoffs"]["loaded"]["shm"] <= many
    took = loops[-1]["handoff_ms"]
    assert {"wait", "move", "load", "total"} <= set(took["shm"]["4"])
    seen = loops[-1]["arms"]
    assert {clients: one["failed"] for clients, one in seen["shm"].items()} == {"1": 0, "4": 0}
    assert all(one["tokens_per_s"] > 0 for one in seen["shm"].values())
