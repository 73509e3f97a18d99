"""Comparisons of policies, and measurement and validation against a deployment."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.services.config import SchedulerSettings
from baton.services.simulate.deployment import Setup, Split
from baton.services.simulate.engine import Job, Machine, SimulatedEngine
from baton.services.simulate.loop import VirtualLoop, run
from baton.services.simulate.profile import Engine, Handoff, Pace, Profile
from baton.services.simulate.traces import Conversations
from baton.services.simulate.worker import SimulatedWorker
from harness.simulate.baselines import POLICIES, RoundRobin
from harness.simulate.compare import compare, named
from harness.simulate.measure import Sizes, measure
from harness.simulate.validate import CHATS, drive, errors

PACE = Pace(
    prefill=[(0, 0.01), (256, 0.1124)],
    prefill_context_s=1e-7,
    decode=[(0, 0.01), (1, 0.012), (16, 0.042)],
    overhead_s=0.004,
)
PROFILE = Profile(pace=PACE, engine=Engine(step_tokens=256, batch=16, kv_tokens=40_000, max_model_len=4_160))


@dataclass
class Streamed:
    """An answer on virtual time."""

    asked: float
    arrivals: list[float]
    token_ids: list[int] = field(default_factory=list)


class Engined:
    """A deployment with one simulated engine."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.engine = SimulatedEngine(loop, PROFILE, 10, Machine(0))
        self.worker = SimulatedWorker(
            "mixed-0", pb.ROLE_MIXED, profile=PROFILE, block_tokens=10, engine=self.engine
        )
        self.prompts: list[list[int]] = []

    def describe(self) -> Any:
        status = SimpleNamespace(identity=self.worker.identity, load=self.worker.load())
        return SimpleNamespace(workers=[status])

    async def stream(self, http: object, prompt: list[int], output: int) -> Streamed:
        del http
        self.prompts.append(prompt)
        asked = self.loop.time()
        job = Job([], len(prompt), output, False, self.loop.create_future())
        self.engine.submit(job)
        await job.over
        gap_s = (self.loop.time() - job.first_at) / max(1, output - 1)
        first = job.first_at + PACE.overhead_s
        return Streamed(asked, [first + gap_s * at for at in range(output)], [7] * output)


def test_a_measured_profile_equals_that_of_the_engine() -> None:
    loop = VirtualLoop()
    measured = measure(Engined(loop), Engined(loop).stream, Sizes(256, 2_048), "engine")  # type: ignore[arg-type]
    found = run(measured, loop)
    # The worker also reports the block that vLLM reserves.
    assert found.engine == PROFILE.engine.model_copy(update={"kv_tokens": 40_010})
    assert found.handoff == Handoff()
    for tokens in (32, 100, 256):
        # Overhead and step time cannot be separated exactly.
        first_s, expected_s = (one.overhead_s + one.step_s(tokens, 0, 0, 0) for one in (found.pace, PACE))
        assert first_s == pytest.approx(expected_s, rel=0.02)
    for requests in (1, 5, 16):
        assert found.pace.step_s(0, 0, requests, 0) == pytest.approx(PACE.step_s(0, 0, requests, 0), rel=0.02)
    assert found.pace.prefill_context_s == pytest.approx(1e-7, rel=0.2)


def test_requests_continue_their_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = VirtualLoop()
    one = Engined(loop)
    monkeypatch.setattr("harness.simulate.validate.time.perf_counter", loop.time)
    trace = Conversations(CHATS, 1.0, 20.0, block_tokens=10, most_tokens=4_000)
    sent: dict[tuple[int, ...], list[int]] = {}

    async def stream(http: object, prompt: list[int], output: int) -> Streamed:
        answer = await one.stream(http, prompt, output)
        sent[tuple(prompt)] = prompt + answer.token_ids
        return answer

    async def sent_all() -> dict[str, float]:
        driven = asyncio.create_task(drive(one, trace, stream))  # type: ignore[arg-type]
        return await driven

    async def inline(call: Any, *of: Any) -> Any:
        return call(*of)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    figures = run(sent_all(), loop)
    assert figures["requests"] == len(one.prompts) > 15
    assert figures["computed_tokens"] == sum(map(len, one.prompts))
    beginnings = {tuple(prompt[:500]) for prompt in one.prompts}
    assert len(beginnings) <= CHATS.shared
    ends = list(sent.values())
    follow = [one_ for one_ in one.prompts if any(one_[: len(end)] == end for end in ends)]
    assert len(follow) > 5


def test_errors_are_in_per_cent() -> None:
    assert errors({"a": 200.0, "b": 50}, {"a": 150.0, "b": 60}) == {"a": -25.0, "b": 20.0}


def test_every_policy_works_and_has_its_character() -> None:
    setup = Setup(Split(3, 3), PROFILE, SchedulerSettings(), warm_share=0.0)
    found = compare(
        setup,
        lambda seed: Conversations(CHATS, 3.0, 30.0, seed=seed, block_tokens=10, most_tokens=4_000),
        POLICIES,
        1,
    )
    figures = {name: one.figures for name, one in found.items()}
    assert all(one["failed"] == 0 for one in figures.values())
    shares = {name: one["computed_share"] for name, one in figures.items()}
    assert max(shares["longest prefix"], shares["Baton"]) < min(shares["random"], shares["round robin"])
    assert {one["known_share"] for name, one in figures.items() if not POLICIES[name][1]} == {0.0}


def test_round_robin_takes_turns() -> None:
    picker = RoundRobin(SchedulerSettings())
    scored: Any = [(SimpleNamespace(role=1, worker_id=name), 0.5) for name in "abc"]
    other: Any = [(SimpleNamespace(role=2, worker_id="d"), 0.5)]
    draw = random.Random(0)
    picked = [picker.pick(one, draw).worker_id for one in itertools.chain([scored] * 4, [other], [scored])]
    assert picked == ["a", "b", "c", "a", "d", "b"]


def test_arms_are_selected_by_name() -> None:
    assert list(named([])) == list(POLICIES)
    with pytest.raises(SystemExit, match=r"no policy 'baton'; there are: random"):
        named(["baton"])
