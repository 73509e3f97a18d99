"""Requests that were running when an engine failed are tried alone, one at a time: cleared or convicted."""

import asyncio
import re
from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.engine import FinishReason

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed
from baton.scheduler.client import Placement
from baton.services.engine import wire
from baton.services.router import errors, pool, worker_stream
from baton.services.router import suspects as module
from baton.services.router.http.forms import error_response
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.suspects import TRIAL_TOKENS, Convicts, Quarantine, Suspicion
from baton.services.router.vllm.engine_client import request_digest, request_shape
from harness.fake_worker import FakeWorker, Fault, until
from harness.router import engine_request
from tests.services.router import asking
from tests.services.router.asking import PROMPT, share

ENGINE = Failed.CODE_ENGINE
TOKENS = 20


def right(got, prompt, count=TOKENS):
    asking.right(got, prompt, count)


def alone(*workers):
    return [start for worker in workers for start in worker.seen.starts if start.alone_tokens]


def convicted(got):
    assert got.error.http_status == 500
    assert re.search("failed while it ran this request alone: .*the test wants it", str(got.error))


@pytest.mark.parametrize("goes_on", [True, False], ids=["the engine goes on", "the worker ends"])
@pytest.mark.parametrize(("phase", "after"), [(PHASE_PREFILL, 0), (PHASE_DECODE, 0), (PHASE_DECODE, 1)])
async def test_a_request_continues_after_a_passed_trial(cluster, goes_on, phase, after):
    workers = await cluster.pair(prefill=2, decode=2)
    share(workers, Fault(phase, after, failed=ENGINE, goes_on=goes_on))
    right(await cluster.ask(PROMPT, TOKENS), PROMPT)
    [trial] = alone(*workers)
    assert (trial.phase, trial.alone_tokens) == (PHASE_DECODE, TRIAL_TOKENS)
    assert not trial.HasField("source")
    failed = next(one for one in workers if any(s.phase == phase and s.epoch == 1 for s in one.seen.starts))
    assert (trial in failed.seen.starts) == goes_on, "the engine that failed is empty, if it goes on"
    later = [start for one in workers for start in one.seen.starts if start.epoch > trial.epoch]
    assert all(not start.alone_tokens for start in later)
    assert len(later) == 2, "it goes on with a handoff, as any other"


async def test_a_request_that_fails_an_engine_alone_is_convicted(cluster):
    workers = await cluster.pair(prefill=2, decode=2)
    share(workers, *([Fault(PHASE_PREFILL, failed=ENGINE)] + [Fault(PHASE_DECODE, failed=ENGINE)] * 3))
    convicted(await cluster.ask(PROMPT, TOKENS))
    [trial] = alone(*workers)
    starts = [start for worker in workers for start in worker.seen.starts]
    assert {start.epoch for start in starts} == {1, trial.epoch}


async def test_a_repeat_of_a_convicted_request_is_refused(cluster):
    workers = await cluster.pair()
    # The trial is on the worker whose engine failed and continues.
    fails = {PHASE_PREFILL: True, PHASE_DECODE: False}
    workers[0].faults += [Fault(phase, failed=ENGINE, goes_on=goes_on) for phase, goes_on in fails.items()]
    convicted(await cluster.ask(PROMPT, TOKENS, seed=1))
    starts = [len(worker.seen.starts) for worker in workers]
    with pytest.raises(Exception, match="made an engine fail a short while ago") as refused:
        await cluster.ask(PROMPT, TOKENS, seed=2)
    assert refused.value.http_status == 422
    assert [len(worker.seen.starts) for worker in workers] == starts, "no worker saw it"
    right(await cluster.ask([*PROMPT, 8], TOKENS), [*PROMPT, 8])
    right(await cluster.ask(PROMPT, TOKENS - 1), PROMPT, TOKENS - 1)


async def test_each_further_failure_in_a_batch_makes_the_trial_longer(cluster):
    workers = await cluster.pair()
    fails, passes = Fault(PHASE_DECODE, 1, failed=ENGINE, goes_on=True), Fault(PHASE_DECODE, 99)
    workers[1].faults = deque([fails, passes] * 3)
    right(await cluster.ask(PROMPT, 100), PROMPT, 100)
    assert [start.alone_tokens for start in alone(*workers)] == [4, 16, 64]


async def test_a_request_under_which_two_engines_ended_runs_alone_to_its_end(cluster):
    worker = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))

    def end():
        for one in worker._running.values():
            if not one.start.alone_tokens:
                one.fault = Fault(PHASE_DECODE, 3, failed=ENGINE)

    worker.before_step = end
    right(await cluster.ask(PROMPT, 100), PROMPT, 100)
    first, last = alone(worker)
    assert (first.alone_tokens, last.alone_tokens) == (TRIAL_TOKENS, 100 - len(last.output_token_ids))


async def test_a_request_that_an_engine_ended_is_tried_once_more(cluster):
    workers = await cluster.pair(decode=2)
    share(workers[1:], *[Fault(PHASE_DECODE, 1, end_with=FinishReason.ERROR)] * 2)
    got = await cluster.ask(PROMPT, TOKENS)
    assert "while it ran this request alone" in str(got.error)
    assert len(alone(*workers)) == 1


@pytest.mark.parametrize("lost_before", [0, 2], ids=["beside others", "as a suspect"])
async def test_a_worker_that_hangs_and_then_dies_counts_once(cluster, monkeypatch, lost_before):
    """It comes back and is used again, because there is no other worker."""
    monkeypatch.setattr(pool, "SUSPECT_S", 0.1)
    monkeypatch.setattr(worker_stream, "CALL_TIMEOUT_S", 0.5)
    cluster.remake(silence_s=0.4)
    names = [f"m{number}" for number in range(lost_before + 1)]
    workers = [await cluster.members.add(FakeWorker(name, pb.ROLE_MIXED)) for name in names]
    dies, hangs, waits = (Fault(PHASE_DECODE, **{how: True}) for how in ("die", "hang", "silent"))
    faults = share(workers, *[dies] * lost_before, hangs, waits)
    await cluster.send("q", PROMPT, TOKENS)
    await until(lambda: any(worker.hangs for worker in workers), "one hangs")
    [hung] = [worker for worker in workers if worker.hangs]
    lost = {"trouble": "lost", "worker": hung.worker_id}
    await until(lambda: cluster.count("retries_total", **lost) == 1, "it is lost")
    hung.hangs = False
    await until(lambda: not faults, "it is asked again")
    await hung.die()
    spare = await cluster.members.add(FakeWorker("spare", pb.ROLE_MIXED))
    right(await cluster.answer("q"), PROMPT)
    assert cluster.count("retries_total", **lost) == 2
    assert bool(alone(spare)) == bool(lost_before), "one lost worker makes no suspect"


def test_a_suspect_is_not_tried_on_the_worker_that_it_just_lost():
    worker = pb.Worker(worker_id="m0")
    placed, suspects = Placement(Attempt("q", 1), None, worker), Quarantine()
    suspects.use(worker)
    assert suspects.worker_for(placed, (), None) == worker
    assert suspects.worker_for(placed, {"m0"}, None) is None
    suspects.note(Failure(Trouble.MEDIA, "m0", ""), placed, excluded := set())
    assert not excluded  # a worker that lacks an image is not to blame


async def test_a_request_that_silently_loses_its_workers_is_given_up_but_not_convicted(cluster):
    """Workers may have been killed for other reasons, so the client may send the request again."""
    workers = await cluster.pair(decode=5)
    share(workers, *[Fault(PHASE_DECODE, die=True)] * 4)
    got = await cluster.ask(PROMPT, TOKENS)
    assert "4 workers of at most 4 failed under the request" in str(got.error)
    assert got.error.http_status == 503
    assert got.error.error.final, "no client library sends it again by itself"
    assert len(alone(*workers)) == 2, "two losses make it a suspect, so it is tried alone"
    assert sum(worker._server is None for worker in workers) == 4, "a request takes at most four workers"
    assert cluster.count("suspects_total", end="convicted") == 0
    right(await cluster.ask(PROMPT, TOKENS), PROMPT)


async def test_losses_of_a_suspect_have_the_same_limit(cluster):
    workers = await cluster.pair(decode=6)
    fails = Fault(PHASE_DECODE, failed=ENGINE, goes_on=True)
    share(workers, fails, *[Fault(PHASE_DECODE, die=True)] * 9)
    got = await cluster.ask(PROMPT, TOKENS)
    assert "4 workers of at most 4 failed" in str(got.error)
    assert sum(worker._server is None for worker in workers) == 4


async def test_neighbours_of_a_request_that_kills_its_workers_continue(cluster):
    """There is one worker at a time, so all requests meet again on the next one."""
    workers = []

    async def start():
        worker = FakeWorker(f"m{len(workers)}", pb.ROLE_MIXED, step_s=0.01)

        def poisoned():
            for one in worker._running.values():
                if one.start.request_id == "killer":
                    one.fault = Fault(one.start.phase, die=True)

        worker.before_step = poisoned
        workers.append(await cluster.members.add(worker))

    await start()
    names = {f"q{number}": [*PROMPT, number] for number in range(4)}
    for name, prompt in {**names, "killer": PROMPT}.items():
        await cluster.send(name, prompt, TOKENS)
    while not all(one.over for one in cluster.got.values()):
        await until(lambda: workers[-1]._server is None or all(one.over for one in cluster.got.values()), "")
        if workers[-1]._server is None:
            await cluster.members.leave(workers[-1])
            await start()
    for name, prompt in names.items():
        right(cluster.got[name], prompt)
    assert "4 workers of at most 4 failed" in str(cluster.got["killer"].error)
    assert len(workers) == 5, "it took four"


async def test_many_are_tried_one_at_a_time(cluster):
    """All requests of the failed step are suspects; the worker is told that more follow."""
    prefill, decode = await cluster.pair(step_s=0.01)
    names = [f"q{number}" for number in range(6)]
    decode.faults = deque(Fault(PHASE_DECODE, 3, failed=ENGINE, goes_on=True) for _ in names)
    running = []
    decode.before_step = lambda: running.append(
        sum(one.start.alone_tokens > 0 for one in decode._running.values())
    )
    for number, name in enumerate(names):
        await cluster.send(name, [*PROMPT, number], TOKENS)
    for number, name in enumerate(names):
        right(await cluster.answer(name), [*PROMPT, number])
    assert max(running) == 1
    trials = alone(decode)
    assert sorted(start.request_id for start in trials) == names, "each once"
    assert not trials[-1].more_alone
    assert any(start.more_alone for start in trials)
    assert not alone(prefill)


class Trials:
    """A quarantine, and the order in which its trials began. They end with `ends`."""

    def __init__(self, monkeypatch):
        self.suspects, self.order, self.ends = Quarantine(), [], asyncio.Event()
        self.now = 1000.04
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    async def ask(self, name, computes=10, generates=TRIAL_TOKENS):
        async def trial():
            async with self.suspects.turn(computes, generates):
                self.order.append(name)
                await self.ends.wait()

        task = asyncio.create_task(trial())
        await asyncio.sleep(0)
        return task

    async def end(self, tasks):
        self.ends.set()
        await asyncio.gather(*tasks)


async def test_the_shortest_trial_goes_first(monkeypatch):
    trials = Trials(monkeypatch)
    sizes = {"end": (50, 900), "long": (2000, 4), "a": (100, 4), "b": (60, 4)}
    asking_together = [trials.ask(name, *size) for name, size in sizes.items()]
    await trials.end(await asyncio.gather(*asking_together))
    assert trials.order == ["a", "b", "long", "end"]


async def test_an_endless_trial_does_not_block_the_others(monkeypatch):
    """Its grammar may be compiling. The worker admits suspects one at a time."""
    monkeypatch.setattr(module, "TURN_S", 0.05)
    trials = Trials(monkeypatch)
    tasks = [await trials.ask(name) for name in "abc"]
    await until(lambda: len(trials.order) == 3, "all have their turns")
    await trials.end([*tasks, await trials.ask("d"), await trials.ask("e")])
    assert trials.order == ["a", "b", "c", "d", "e"]


async def test_a_suspect_that_leaves_lets_the_next_one_in(monkeypatch):
    trials = Trials(monkeypatch)
    tasks = [await trials.ask(name) for name in "abc"]
    await until(lambda: trials.order == ["a"], "the first is tried")
    tasks[1].cancel()
    tasks[0].cancel()
    await until(lambda: trials.order == ["a", "c"], "the last is tried", module.TURN_S / 2)
    await trials.end(tasks[2:])


async def test_a_long_trial_does_not_wait_for_much_later_short_ones(monkeypatch):
    trials = Trials(monkeypatch)
    tasks = [await trials.ask("first")]
    for name, generates in (("long", 900), ("soon after", TRIAL_TOKENS), ("late", TRIAL_TOKENS)):
        trials.now += 4.0 if name == "late" else 0.5
        tasks.append(await trials.ask(name, 10, generates))
    await trials.end(tasks)
    assert trials.order == ["first", "soon after", "long", "late"]


@pytest.mark.parametrize(
    ("failures", "suspect", "to_its_end", "is_convicted"),
    [
        ([(Trouble.ENGINE, False)], True, False, False),
        ([(Trouble.ENGINE, False), (Trouble.ENGINE, True)], True, False, True),
        ([(Trouble.ENGINE, False), None, (Trouble.ENGINE, False)], True, True, False),
        ([(Trouble.ENGINE, False), None], False, False, False),
        ([(Trouble.LOST, False)], False, False, False),
        ([(Trouble.LOST, False), (Trouble.LOST, False)], True, False, False),
        ([(Trouble.LOST, False)] * 2 + [(Trouble.LOST, True)] * 5, True, False, False),
        ([(Trouble.LOST, False)] * 2 + [(Trouble.ENGINE, True)], True, False, True),
        ([(Trouble.LOST, False)] * 2 + [None, (Trouble.LOST, False)], False, False, False),
        ([(Trouble.LOST, False)] * 2 + [None] + [(Trouble.LOST, False)] * 2, True, True, False),
        ([(Trouble.LOST, False), (Trouble.REFUSED, False), (Trouble.LOST, False)], True, False, False),
        ([(Trouble.ENGINE, False), (Trouble.LOST, True)], True, False, False),
        ([(Trouble.ENGINE, False), (Trouble.REFUSED, True)], True, False, False),
        ([(Trouble.HANDOFF, False), (Trouble.STALE, False)], False, False, False),
        ([(Trouble.LOST, False, 2)] * 5, False, False, False),  # it made progress in between
        ([(Trouble.LOST, False, 0, "w")] * 2, False, False, False),  # it may have hung and then died
        ([(Trouble.LOST, False, 0, "w")] * 3, True, False, False),  # the request breaks the stream each time
    ],
)
def test_suspicion_by_failures(failures, suspect, to_its_end, is_convicted):
    """A failure: its kind, whether the request ran alone, the tokens it generated, and the worker."""
    suspicion = Suspicion()
    for number, failure in enumerate(failures):
        if failure is None:
            suspicion.passed()
        else:
            trouble, alone, generated, worker_id = (*failure, *(0, f"w{number}")[len(failure) - 2 :])
            suspicion.note(Failure(trouble, worker_id, "it failed"), alone=alone, generated=generated)
    found = suspicion.suspect, suspicion.to_its_end, suspicion.convicted
    assert found == (suspect, to_its_end, is_convicted)


@pytest.mark.parametrize("goes_on", [True, False])
def test_only_failures_that_engines_survive_are_forgotten(goes_on):
    """Without a limit one client's failing requests would make all others run alone."""
    suspicion = Suspicion()
    for _ in range(3):
        suspicion.note(Failure(Trouble.ENGINE, "w", "it failed", goes_on), alone=False, generated=40)
        suspicion.passed()
    assert suspicion.to_its_end == (not goes_on)


def encoded(name="q", prompt=PROMPT, **params):
    return wire.encode_request(engine_request(name, prompt, TOKENS, **params))


def test_equal_requests_have_equal_digests():
    one = request_digest(encoded("a", seed=1))
    assert request_digest(encoded("b", seed=2)) == one
    for other in (encoded(prompt=[1, 2]), encoded(temperature=0.5), encoded(logprobs=2), encoded(stop=["x"])):
        assert request_digest(other) != one


def test_a_shape_contains_no_content():
    shape = request_shape(encoded(stop=["a secret"], logit_bias={7: 1.5}, temperature=0.5, logprobs=3))
    assert "secret" not in shape
    for word in ("prompt of 3 tokens", "stop (list of 1)", "logit_bias (dict of 1)", "temperature (0.5)"):
        assert word in shape


def test_the_table_is_bounded_in_number_and_time(monkeypatch):
    now = 0.0
    monkeypatch.setattr(module, "MOST_CONVICTS", 3)
    table = Convicts(bytes, repr, lambda: now)
    for name in (b"a", b"b", b"c", b"d"):
        table.add("q", name, "it failed")
        now += 1
    table.check(b"a")  # the oldest was dropped
    with pytest.raises(errors.Convicted) as refused:
        table.check(b"b")
    assert refused.value.retry_after_s == module.CONVICTED_S - 3
    now += module.CONVICTED_S
    for name in (b"b", b"c", b"d"):
        table.check(name)
    assert not len(table)
    Convicts(None, repr).check(b"a")  # an empty table digests nothing


@pytest.mark.parametrize("error", [errors.EngineBroken("x"), errors.Convicted("x", retry_after_s=5)])
def test_clients_are_told_not_to_retry(error):
    start, _ = error_response(error)
    assert (b"x-should-retry", b"false") in start["headers"]
