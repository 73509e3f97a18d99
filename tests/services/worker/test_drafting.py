"""A real worker's draft metrics."""

import urllib.request
from contextlib import closing

import grpc
import pytest

from baton.protos import scheduler_pb2, scheduler_pb2_grpc
from harness.support import eventually
from tests.services.worker.router import DECODE, connected, hello, prompt, request

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
FEW = [5, 6, 7]


@pytest.fixture(scope="module")
def drafting(workers):
    return workers.started("mixed", engine={"speculative_config": NGRAM})


def labelled(worker, name):
    """Return a metric's values by labels."""
    with closing(urllib.request.urlopen(worker.metrics, timeout=5)) as reply:
        lines = reply.read().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(f"{name}{{"))
    return {labels.removeprefix(name): float(value) for labels, _, value in found}


def described(worker):
    """Return the worker's last report of its drafts."""
    with grpc.insecure_channel(worker.scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        answer = stub.Describe(scheduler_pb2.DescribeRequest(), timeout=5)
    return next(one.load.drafting for one in answer.workers if one.identity.worker_id == worker.name)


async def test_metrics_equal_the_sums_over_requests(drafting):
    """The sums are compared in total, by position, and with the reports to the router."""
    before = {name: drafting.figure(f"baton_worker_{name}_total") for name in ("drafts", "drafted_tokens")}
    assert before == {"drafts": 0, "drafted_tokens": 0}
    drafts = drafted = accepted = 0
    accepted_at = [0, 0, 0]
    async with connected(drafting.address) as stream:
        for number in range(4):
            # With three different tokens, many drafts match and some are wrong.
            core = request(f"drafts-{number}", [number, *prompt(20)], max_tokens=60, allowed_token_ids=FEW)
            got = await stream.run(core, DECODE)
            told = got.drafts
            assert len(got.tokens) == 60
            drafts += sum(told.histogram)
            drafted += told.num_draft_tokens
            for length, count in enumerate(told.histogram):
                accepted += length * count
                for position in range(length):
                    accepted_at[position] += count
            # Each step generates the accepted tokens and one more; the first has no draft.
            assert sum(told.histogram) + sum(j * c for j, c in enumerate(told.histogram)) < 60
    assert drafts > 20
    assert 0 < accepted < drafted
    assert drafting.figure("baton_worker_drafts_total") == drafts
    assert drafting.figure("baton_worker_drafted_tokens_total") == drafted
    assert drafting.figure("baton_worker_accepted_tokens_total") == accepted
    by_position = labelled(drafting, "baton_worker_accepted_tokens_by_position_total")
    position = '{{method="ngram",position="{}",source="match"}}'.format
    assert by_position == {position(at): float(count) for at, count in enumerate(accepted_at)}
    first = labelled(drafting, "baton_worker_drafted_tokens_by_position_total")
    assert first[position(0)] == drafts

    eventually(lambda: described(drafting).drafts == drafts, 5, "the scheduler hears of the drafts")
    report = described(drafting)
    assert report.draft_length == 3
    assert report.first_acceptance == pytest.approx(accepted_at[0] / drafts)
    mean = pytest.approx(1 + accepted / drafts)
    assert report.mean_accepted_length == mean
    assert labelled(drafting, "baton_worker_mean_accepted_length") == {'{method="ngram"}': mean}
    assert labelled(drafting, "baton_worker_acceptance_alarm") == {'{method="ngram"}': 0.0}


async def test_drafts_of_a_request_with_a_stop_string_are_reported(drafting):
    """The router aborts such a request, so each output reports the drafts so far."""
    core = request("stop", prompt(20), max_tokens=400, stop=["never"], detokenize=True, allowed_token_ids=FEW)
    async with connected(drafting.address) as stream:
        await stream.start(core, DECODE)
        got = await stream.some("stop", 40)
        assert got.finish is None
        assert sum(got.drafts.histogram) > 0
        await stream.abort("stop")


async def test_the_phases_of_a_step_add_up(drafting):
    parts = labelled(drafting, "baton_worker_engine_step_phase_seconds_sum")
    assert set(parts) == {f'{{phase="{phase}"}}' for phase in ("draft", "verify", "rest")}
    assert all(seconds > 0 for seconds in parts.values())

    def add_up():  # polled, as steps may end between two scrapes
        whole = drafting.figure("baton_worker_engine_step_seconds_sum")
        parts = labelled(drafting, "baton_worker_engine_step_phase_seconds_sum")
        return sum(parts.values()) == pytest.approx(whole, rel=0.01)

    eventually(add_up, 10, "the parts add up")


async def test_hello_names_the_method(drafting, mixed):
    assert (await hello(drafting.address)).identity.capacity.speculative_method == "ngram"
    assert (await hello(mixed.address)).identity.capacity.speculative_method == ""


async def test_without_speculation_there_are_no_draft_metrics(mixed, target):
    got = await target.run(request("plain", prompt(20), max_tokens=4), DECODE)
    assert got.drafts is None
    assert labelled(mixed, "baton_worker_drafts_total") == {}
    parts = labelled(mixed, "baton_worker_engine_step_phase_seconds_sum")
    assert parts['{phase="draft"}'] == 0.0
