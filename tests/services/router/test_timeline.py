import json

import pytest

from baton.protos import worker_pb2
from baton.services.router.record import record_of
from baton.services.router.state import RequestState
from baton.services.router.timeline import TO_FIRST_TOKEN, other_stages, to_first_token
from baton.services.router.timings import Event, HttpTimes, Process, Timings

P, D, S = Process("baton-prefill", "p0"), Process("baton-decode", "d0"), Process("baton-scheduler", "s:1")


AFTER = {"asked": 0.01, "placed": 0.03, "queued": 0.06, "prefill_began": 0.1, "prefill_ended": 0.15}


def attempt(at=1.0, **moments):
    """Return an attempt from `at` on whose stages take 10 ms, 20 ms, 30 ms, ..."""
    usual = {"number": 1, "scheduler": S, "scheduler_s": 0.01, "prefiller": P, "decoder": D}
    usual |= {name: at + after for name, after in AFTER.items()} | {"first_token": at + 0.21}
    return Timings(**{**usual, **moments})


def request(*attempts, **fields):
    state = RequestState("r", "f", b"", prompt_tokens=3, max_tokens=8, max_model_len=64, deadline=1e9)
    state.http = HttpTimes(arrived=0.5, admitted=0.6, received=0.7, streams=True)
    state.taken, state.charged = 0.9, 1.0
    *before, state.timings = attempts
    state.before.extend(before)
    state.attempts = len(attempts)
    for name, value in fields.items():
        setattr(state, name, value)
    return state


def rounded(stages):
    return [(one.name, round(one.seconds, 6)) for one in stages]


def test_the_stages_to_the_first_token_have_no_gap():
    state = request(attempt(), first_token=1.211)
    state.http.first_byte = 1.3
    stages = to_first_token(state)
    names = ("admit", "receive", "render", "admit", "wait", "place", "send")
    names += ("queue", "prefill", "reply", "deliver")
    seconds = (0.1, 0.1, 0.2, 0.1, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.09)
    assert rounded(stages) == [*zip(names, seconds, strict=True)]
    assert [one.begin for one in stages[1:]] == [one.end for one in stages[:-1]]
    assert {one.name: one.process for one in stages if one.process.instance} == {"queue": P, "prefill": P}
    assert {one.name for one in stages} <= set(TO_FIRST_TOKEN)


def test_a_prefill_stage_has_its_number_of_steps():
    stages = {one.name: one for one in to_first_token(request(attempt(chunks=3), first_token=1.3))}
    assert stages["prefill"].attributes == {"chunks": 3}
    unknown = request(attempt(chunks=3, prefill_began=0.0), first_token=1.3)
    assert not any(one.attributes for one in to_first_token(unknown))


def test_the_beginning_of_a_prompt_from_another_worker():
    told = worker_pb2.Admitted(move_ms=10, load_ms=5, bytes=7, transport="shm", tokens=65)
    one = attempt(prefix_asked=1.03, prefix_saved=1.04, prefix_loaded=1.09, prefix=told)
    state = request(one, first_token=1.211, ended=2.0)
    assert rounded(to_first_token(state))[6:9] == [("fetch", 0.01), ("send", 0.02), ("queue", 0.04)]
    [loaded] = [stage for stage in other_stages(state) if stage.name == "prefix"]
    assert (round(loaded.seconds, 6), round(loaded.end, 6), loaded.within) == (0.015, 1.09, "queue")
    assert loaded.process == P
    assert loaded.attributes == {"tokens": 65, "bytes": 7, "transport": "shm"}


def test_time_between_unknown_timestamps_is_other():
    """An engine without statistics reports no times."""
    state = request(attempt(queued=0.0, prefill_began=0.0), first_token=1.3)
    found = dict(rounded(to_first_token(state)))
    assert found["other"] == pytest.approx(0.12)  # from the placement to the engine's output
    assert not {"send", "queue", "prefill"} & found.keys()
    assert sum(found.values()) == pytest.approx(0.71 - 0.1)  # `admit` occurs twice


def test_clocks_that_disagree_make_no_negative_stage():
    stages = to_first_token(request(attempt(queued=1.02, prefill_began=1.25), first_token=1.3))
    assert all(one.seconds >= 0 for one in stages)
    assert stages[-1].end == 1.25


def test_a_token_held_back_for_the_decode_worker():
    state = request(attempt(held=True), first_token=1.5)
    state.http.first_byte = 1.6
    assert rounded(to_first_token(state))[-2:] == [("hold", 0.29), ("deliver", 0.1)]


def test_a_lost_worker_before_the_first_token():
    lost = attempt(first_token=0.0, queued=0.0, prefill_began=0.0, prefill_ended=0.0, ended=2.0)
    state = request(lost, attempt(2.5, number=2, prefiller=D), first_token=2.8)
    stages = to_first_token(state)
    seconds = {"wait": 0.01, "place": 0.02, "lost": 0.97}
    assert rounded(stages)[4:9] == [*seconds.items(), ("wait", 0.51), ("place", 0.02)]
    assert [one.attempt for one in stages[4:]] == [1] * 3 + [2] * 6
    assert stages[6].process == P


def test_a_request_that_was_never_placed():
    state = request(Timings(), attempts=0, ended=4.0)
    assert rounded(to_first_token(state))[-1] == ("wait", 3.0)


def test_the_handoff_and_the_decode():
    told = worker_pb2.Admitted(
        wait_ms=10, move_ms=20, check_ms=5, load_ms=15, total_ms=60, bytes=7, early_bytes=5, transport="shm"
    )
    one = attempt(saved=1.149, save_ms=4.0, admitted=1.4, handoff=told, resumed=1.45)
    one.last_token = 2.0
    state = request(one, first_token=1.21, ended=2.1)
    state.tokens.extend(range(8))
    state.http.ended = 2.2
    found = {stage.name: stage for stage in other_stages(state)}
    seconds = {name: round(stage.seconds, 6) for name, stage in found.items()}
    assert seconds == {
        "schedule": 0.01,
        "handoff.save": 0.004,
        "handoff": 0.19,
        "handoff.wait": 0.01,
        "handoff.move": 0.02,
        "handoff.check": 0.005,
        "handoff.load": 0.015,
        "decode.first": 0.05,
        "decode": 0.55,
        "end": 0.2,
    }
    assert round(found["handoff.load"].end, 6) == 1.4
    assert found["handoff.save"].process == P
    assert found["handoff.move"].process == found["decode"].process == D
    assert found["schedule"].process == S
    assert {one.within for name, one in found.items() if name.startswith("handoff.")} - {""} == {"handoff"}
    assert found["decode"].attributes["tokens"] == 8
    assert found["handoff"].attributes == {"bytes": 7, "transport": "shm", "early_bytes": 5}


def test_a_handoff_that_is_quicker_than_the_first_token_s_way_here():
    told = worker_pb2.Admitted(wait_ms=1, move_ms=5, load_ms=4, total_ms=10)
    one = attempt(saved=1.149, save_ms=4.0, admitted=1.205, handoff=told, resumed=1.22)
    stages = list(other_stages(request(one, first_token=1.211, ended=2.1)))
    [whole] = [stage for stage in stages if stage.name == "handoff"]
    parts = [stage for stage in stages if stage.within == "handoff"]
    assert (round(whole.begin, 6), whole.end) == (1.195, 1.205)
    assert (parts[0].begin, round(parts[-1].end, 6)) == (whole.begin, whole.end)


def test_a_later_attempt_has_its_own_stages():
    first = attempt(ended=3.0, resumed=1.5, last_token=2.9)
    second = attempt(3.0, number=2, tokens_before=5, last_token=4.0, decoder=P)
    state = request(first, second, first_token=1.21, ended=4.1)
    state.tokens.extend(range(9))
    later = other_stages(state)
    names = [one.name for one in later if one.attempt == 2]
    assert names == ["wait", "place", "send", "queue", "prefill", "reply", "schedule", "decode"]
    tokens = {one.attempt: one.attributes["tokens"] for one in later if one.name == "decode"}
    assert tokens == {1: 5, 2: 4}


def test_a_record_is_plain_values():
    cause = {"trouble": "lost", "worker": "d0", "message": "worker d0: its stream ended"}
    state = request(attempt(ended=3.0), attempt(3.0, number=2), first_token=1.21, ended=4.1, outcome="stop")
    state.events.append(Event("failed", 3.0, 1, cause))
    state.http.first_byte, state.http.ended, state.http.status, state.http.paused_s = 1.4, 4.2, 200, 0.25
    state.model = "tiny"
    record = record_of(state)
    assert record.retried
    assert not record.failed
    told = json.loads(json.dumps(record.to_json()))
    assert (told["ttft_ms"], told["duration_ms"], told["client_ms"]) == (900.0, 3700.0, 250.0)
    assert told["events"] == [{"name": "failed", "at_ms": 2500.0, "attempt": 1, "attributes": cause}]
    assert [one["trouble"] for one in told["attempts"]] == ["lost", ""]
    assert sum(record.first_token_stages.values()) == pytest.approx(record.first_token_s)
