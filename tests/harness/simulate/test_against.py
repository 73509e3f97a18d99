from types import SimpleNamespace

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.services.config import SchedulerSettings
from baton.services.simulate.deployment import Setup, Split
from baton.services.simulate.engine import Job, Machine, SimulatedEngine
from baton.services.simulate.loop import VirtualLoop, run
from baton.services.simulate.profile import Engine, Handoff, Pace, Profile
from baton.services.simulate.traces import Conversations
from baton.services.simulate.worker import SimulatedWorker
from harness.simulate.baselines import POLICIES
from harness.simulate.compare import compare
from harness.simulate.measure import Sizes, measure
from harness.simulate.validate import CHATS

PACE = Pace(
    prefill=[(0, 0.01), (256, 0.1124)],
    prefill_context_s=1e-7,
    decode=[(0, 0.01), (1, 0.012), (16, 0.042)],
    overhead_s=0.004,
)
PROFILE = Profile(pace=PACE, engine=Engine(step_tokens=256, batch=16, kv_tokens=40_000, max_model_len=4_160))


class Engined:
    def __init__(self, loop):
        self.loop = loop
        self.engine = SimulatedEngine(loop, PROFILE, 10, Machine(0))
        self.worker = SimulatedWorker(
            "mixed-0", pb.ROLE_MIXED, profile=PROFILE, block_tokens=10, engine=self.engine
        )

    def describe(self):
        status = SimpleNamespace(identity=self.worker.identity, load=self.worker.load())
        return SimpleNamespace(workers=[status])

    async def stream(self, _http, prompt, output):
        asked = self.loop.time()
        job = Job([], len(prompt), output, False, self.loop.create_future())
        self.engine.submit(job)
        await job.over
        gap_s = (self.loop.time() - job.first_at) / max(1, output - 1)
        first = job.first_at + PACE.overhead_s
        arrivals = [first + gap_s * at for at in range(output)]
        return SimpleNamespace(asked=asked, arrivals=arrivals, token_ids=[7] * output)


def test_a_measured_profile_equals_that_of_the_engine():
    loop = VirtualLoop()
    measured = measure(Engined(loop), Engined(loop).stream, Sizes(256, 2_048), "engine")
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


def test_every_policy_works_and_has_its_character():
    setup = Setup(Split(3, 3), PROFILE, SchedulerSettings(), warm_share=0.0)
    size = {"block_tokens": 10, "most_tokens": 4_000}
    found = compare(setup, lambda seed: Conversations(CHATS, 3.0, 30.0, seed=seed, **size), POLICIES, 1)
    figures = {name: one.figures for name, one in found.items()}
    assert all(one["failed"] == 0 for one in figures.values())
    shares = {name: one["computed_share"] for name, one in figures.items()}
    assert max(shares["longest prefix"], shares["Baton"]) < min(shares["random"], shares["round robin"])
    assert {one["known_share"] for name, one in figures.items() if not POLICIES[name][1]} == {0.0}
