"""Choices by cached prefixes, and choices among many workers."""

import logging
import random
from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.prefix_keys import PromptKeys, key_of
from baton.protos import scheduler_pb2 as pb
from baton.scheduler import knowledge
from baton.scheduler.booking import booking_of
from baton.scheduler.knowledge import LATE_S, Knowledge
from baton.scheduler.metrics import PrefixMetrics
from baton.scheduler.policy import Policy, WorkerChoice
from baton.scheduler.policy.parts import COMPUTED, GUESSED_SPEED, MEASURED_S, HasRoom, PrefillWork
from baton.scheduler.prefixes.index import PrefixIndex
from baton.scheduler.prefixes.prefix_ledger import Match, PrefixLedger
from baton.scheduler.types import FleetView, Reserved
from baton.services.config import PolicySettings
from harness.scheduling import LIMITS, Clock, need
from tests.scheduler.test_policy import D, M, P, worker

BLOCK = 16
# The default and `held_tokens`, which sends repeated short prompts to one decode worker.
HOLDERS_DECODE = PolicySettings(scorers={**PolicySettings().scorers, "held_tokens": 0.5})
KEYS = tuple(key_of(number << 32, number) for number in range(1, 65))


class Held:
    """A fleet, and how many blocks of one prompt its workers hold."""

    def __init__(self, workers, held, clock=None):
        self.view = FleetView({one.worker_id: one for one in workers})
        self.ledger = PrefixLedger(PrefixIndex(100_000), clock or Clock())
        for name, blocks in held.items():
            self.ledger.hear(name, pb.BlockOperations(instance=1, operations=KEYS[:blocks]))
        self.ledger.keep({key: one.role for key, one in self.view.workers.items()})

    def need(self, blocks):
        tokens = blocks * BLOCK
        prompt = PromptKeys(KEYS[:blocks], BLOCK)
        return replace(need(prompt=tokens), prefix=prompt, match=Match(self.ledger, prompt, tokens))

    def choices(self, blocks, times=1, options=HOLDERS_DECODE, **limits):
        policy = Policy(replace(LIMITS, **limits), options, random.Random(1))
        found = [policy.choose(self.view, self.need(blocks)) for _ in range(times)]
        assert all(isinstance(one, WorkerChoice) for one in found)
        return found

    def chosen(self, blocks, times=1, **limits):
        found = self.choices(blocks, times, **limits)
        return Counter((one.prefill.worker_id if one.prefill else "", one.decode.worker_id) for one in found)


def pairs(number, **reserved):
    names = [(f"{side}{one}", role) for one in range(number) for side, role in (("p", P), ("d", D))]
    return [worker(name, role, reserved.get(name)) for name, role in names]


def test_by_default_repeated_prompts_are_spread_over_decode_workers():
    held = Held(pairs(2), {"p1": 4, "d1": 4})
    decodes = Counter(one.decode.worker_id for one in held.choices(4, 40, PolicySettings()))
    assert min(decodes["d0"], decodes["d1"]) > 8


@pytest.mark.parametrize("number", [2, 8, 200])
def test_a_prompt_goes_to_the_worker_that_holds_most_of_it(number):
    held = Held(pairs(number), {"p1": 50, "p0": 20, "d1": 60})
    assert held.chosen(60, 20) == {("p1", "d1"): 20}


def test_a_queue_is_worth_three_times_the_computed_tokens():
    """The worker holds 800 of 960 tokens, so a queue of up to 2,400 tokens is worth waiting for."""
    for queued, expected in ((2_300, "p1"), (2_500, "p0")):
        held = Held(pairs(2, p1=Reserved(prompt_tokens=queued)), {"p1": 50})
        assert {prefill for prefill, _ in held.chosen(60, 20, max_queued_prompt_tokens=10_000)} == {expected}


def test_a_slow_worker_gets_less():
    def with_speed(name, tokens):
        counts = pb.EngineCounts(computed_tokens=tokens, busy_s=2 * MEASURED_S)
        return worker(name, P, load=pb.WorkerLoad(counts=counts))

    scorer = PrefillWork(LIMITS)
    slow, fast, new = with_speed("slow", 10_000), with_speed("fast", 80_000), worker("new", P)
    scores = [scorer.score(one, need(prompt=1_000)) for one in (slow, new, fast)]
    assert scores == sorted(scores)
    assert scores[0] == pytest.approx(1 / (1 + COMPUTED))  # a second of work


def test_workers_with_the_same_prefix_share_the_load():
    number = 40
    held = Held(pairs(number), {f"p{one}": 10 for one in range(number)})
    assert len({prefill for prefill, _ in held.chosen(30, 200)}) > number * 0.9


def test_a_decode_worker_prefills_a_small_rest_itself():
    held = Held(pairs(2), {"d1": 58})
    assert held.chosen(60, 10, handoff_min_tokens=2 * BLOCK + 1) == {("", "d1"): 10}
    assert ("", "d1") not in held.chosen(60, 10, handoff_min_tokens=2 * BLOCK)


def source_of(held, least=10 * BLOCK, options=HOLDERS_DECODE):
    """Return the source if pulling at least `least` tokens is worth it."""
    (choice,) = held.choices(60, options=options, prefix_pull_s=least / GUESSED_SPEED)
    return choice.source


@pytest.mark.parametrize("picker", ["power_of_four", "power_of_two", "best"])
def test_a_prefill_worker_pulls_from_the_worker_that_holds_most(picker):
    options = PolicySettings(scorers=HOLDERS_DECODE.scorers, picker=picker)
    held = Held(pairs(2), {"p0": 20, "d0": 40, "d1": 50})
    source = source_of(held, options=options)
    assert (source.worker.worker_id, source.tokens) == ("d1", 50 * BLOCK)
    nobody = [Held(pairs(2), {"p0": 41, "p1": 41, "d1": 50}), Held(pairs(2), {})]
    assert [source_of(one, options=options) for one in nobody] == [None, None]


def test_a_source_is_found_among_many_workers():
    full = Reserved(requests=8)
    held = Held(pairs(100, d7=Reserved(requests=3, decoding=3)), {"d7": 50})
    found = held.choices(60, 20, PolicySettings(), prefix_pull_s=0.01)
    assert [one.source.worker.worker_id for one in found] == ["d7"] * 20
    assert source_of(Held(pairs(100, d7=full), {"d7": 50})) is None


def test_no_pull_if_it_is_not_worth_it_or_turned_off():
    held = Held(pairs(1), {"p0": 40, "d0": 50})
    assert source_of(held, least=10 * BLOCK) is not None
    assert source_of(held, least=10 * BLOCK + 1) is None
    assert source_of(held, least=0) is None
    fast = pb.EngineCounts(computed_tokens=int(3 * MEASURED_S * GUESSED_SPEED), busy_s=2 * MEASURED_S)
    held.view.workers["p0"].load = pb.WorkerLoad(counts=fast)
    assert source_of(held, least=10 * BLOCK) is None  # computing is faster there


@pytest.mark.parametrize(
    "holder",
    [
        worker("d1", D, Reserved(requests=4)),  # all of its slots are booked
        worker("d1", D, Reserved(prompt_tokens=1)),  # it prefills
        worker("d1", D, state=pb.WORKER_STATE_DRAINING),
        worker("d1", D, fingerprint="other weights"),
        worker("d1", D, transports=["other"]),
    ],
)
def test_a_busy_or_incompatible_worker_is_no_source(holder):
    held = Held([*pairs(1), holder], {"d1": 50})
    assert source_of(held) is None


def test_pulled_tokens_are_not_booked():
    held = Held(pairs(1), {"d0": 50})
    what, source = held.need(60), source_of(held)
    booking = booking_of(what, held.view.workers["p0"], held.view.workers["d0"], source)
    assert booking.prompt_tokens == 10 * BLOCK


def test_only_uncached_tokens_count_for_room():
    held = Held([worker("m", M, Reserved(prompt_tokens=900))], {"m": 58})
    what = held.need(60)
    assert what.tokens_for("m") == 2 * BLOCK
    assert held.chosen(60) == {("", "m"): 1}  # 932 of 1,000 tokens
    assert held.need(58).tokens_for("m") == 1  # the last token is always computed


def test_full_workers_are_skipped_whatever_they_hold():
    full = Reserved(requests=8, blocks=99)
    held = Held(pairs(3, d1=full), {"p1": 60, "d1": 60})
    assert all(prefill == "p1" and decode != "d1" for prefill, decode in held.chosen(60, 20))


def test_a_choice_among_a_thousand_workers_filters_few(monkeypatch):
    looks = 0
    inner = HasRoom.keeps

    def counted(*args):
        nonlocal looks
        looks += 1
        return inner(*args)

    monkeypatch.setattr(HasRoom, "keeps", counted)
    held = Held(pairs(500), {"p7": 40, "d9": 40})
    assert held.chosen(60, 10) == {("p7", "d9"): 10}
    assert looks < 10 * 30


def test_a_pair_with_equal_weights_is_found_among_many():
    """The workers drawn first may have no compatible partner among those drawn on the other side."""
    workers = [worker(f"p{one}", P, fingerprint="f1") for one in range(60)]
    workers += [worker(name, D, fingerprint="f2") for name in (f"d{one}" for one in range(60))]
    workers.append(worker("q", P, fingerprint="f2"))
    assert {prefill for prefill, _ in Held(workers, {}).chosen(20, 20)} == {"q"}


def test_workers_that_do_not_report_are_counted_and_logged_once(caplog):
    caplog.set_level(logging.WARNING, knowledge.__name__)
    clock, registry = Clock(), CollectorRegistry()
    held = Held(pairs(1), {"p0": 5}, clock)
    upkeep = Knowledge(held.ledger, PrefixMetrics(registry), clock)
    for _ in range(4):
        upkeep.look(held.view)
        held.ledger.hear("p0", pb.BlockOperations(instance=1, first=5))
        clock.now += LATE_S / 2 + 0.1
    assert [one.args for one in caplog.records] == [("d0",)]
    assert registry.get_sample_value("baton_scheduler_prefix_workers_unknown") == 1
    assert registry.get_sample_value("baton_scheduler_prefix_workers") == 1
    assert registry.get_sample_value("baton_scheduler_prefix_blocks") == 5
