"""Engines on several hosts answer, and hand over, as one on a single host does, and end with any of them."""

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.handoff.params import load_params, save_params
from harness.architectures.experts import deepseek_v3
from harness.architectures.language import prompt
from harness.gangs import Gang, Options
from harness.netns import Host, Network, why_not
from harness.support import CALL_S, PATIENCE, eventually

WRITTEN = 24
TP = {"tensor_parallel_size": 2, "nodes": 2}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
PROMPTS = {f"r{number}": prompt(number) for number in range(4)}
LONG = [token for number in range(20, 26) for token in prompt(number)][:200]

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]
whole_table = pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: more shapes")


@dataclass
class World:
    """Hosts, and a plain engine on the last."""

    model: Path
    hosts: list[Host]
    plain: Gang
    expected: dict[str, list[int]]

    def spread(self, engine, size=1):
        return Gang(Options(self.model, size, dict(engine), "spread"), self.hosts)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    deepseek_v3(folder / "model")
    with ExitStack() as stack:
        network = stack.enter_context(Network(folder / "network"))
        hosts = [network.host(f"host-{number}", shm_mib=512) for number in range(5)]
        options = Options(folder / "model", 1, {}, "plain")
        plain = stack.enter_context(Gang(options, hosts[-1:]))
        asked = PROMPTS | {"long": LONG}
        for name, tokens in asked.items():
            plain.add(0, name, tokens, WRITTEN)
        yield World(folder / "model", hosts, plain, plain.answers(asked))


def handed_over(source, target, name):
    """Prefill in one engine, decode in the other; return the answer."""
    source.add(0, name, LONG, 1, save_params(1))
    source.answers([name])
    saved = eventually(lambda: source.call(0, "look").saved.get(name), CALL_S, "the KV is saved")
    manifest = saved.manifest
    assert saved.problem is None
    assert len({shard.address for shard in manifest.shards}) == len(manifest.shards)
    assert abs(manifest.saved_at_s - source.call(0, "clock")) < CALL_S
    target.add(0, name, LONG, WRITTEN, load_params(1, manifest.num_tokens, manifest))
    answer = target.answers([name])[name]
    loaded = target.call(0, "look").loaded[name]
    assert loaded.problem is None
    assert loaded.blocks > 0
    assert 0 <= loaded.costs.wait_ms <= loaded.total_ms
    return answer


def check(world, gang):
    for name, tokens in PROMPTS.items():
        gang.add(0, name, tokens, WRITTEN)
    assert gang.answers(PROMPTS) == {name: world.expected[name] for name in PROMPTS}
    assert handed_over(gang, world.plain, f"{id(gang)}-out") == world.expected["long"]
    assert handed_over(world.plain, gang, f"{id(gang)}-in") == world.expected["long"]


def test_tensor_parallel_with_drafts(world):
    with world.spread(TP | DRAFTS) as gang:
        check(world, gang)
        rank = gang.call(1, "ranks")[0]
        gang.add(0, "cut", LONG, 500)
        os.kill(rank, signal.SIGKILL)
        ends_with_its_limb(gang)


def test_a_limb_ends_with_its_leader(world):
    with world.spread(TP) as gang:
        ranks = gang.call(1, "ranks")
        gang.processes[0].kill()
        began = time.monotonic()
        eventually(lambda: not any(map(runs, ranks)), CALL_S, "its ranks have ended", 0.01)
        assert time.monotonic() - began < 3.0 * PATIENCE


@whole_table
def test_pipeline_parallel(world):
    with world.spread({"pipeline_parallel_size": 2, "nodes": 2}) as gang:
        check(world, gang)
        gang.add(0, "cut", LONG, 500)
        gang.processes[1].kill()  # the last stage, whose answers the leader awaits
        ends_with_its_limb(gang)


@whole_table
@pytest.mark.parametrize(
    "engine", [{"nodes": 2}, {"nodes": 4, "tensor_parallel_size": 2}], ids=["dp", "dp-tp"]
)
def test_data_parallel(world, engine):
    with world.spread(engine, size=2) as gang:
        heads = gang.heads
        for number, (name, tokens) in enumerate(PROMPTS.items()):
            gang.add(heads[number % 2], name, tokens, WRITTEN)
        assert gang.answers(PROMPTS) == {name: world.expected[name] for name in PROMPTS}


def ends_with_its_limb(gang):
    began = time.monotonic()
    eventually(lambda: gang.call(0, "look").lost, CALL_S, "the leader learns of it", 0.01)
    assert time.monotonic() - began < 3.0 * PATIENCE
    eventually(lambda: gang.processes[1].poll() is not None, CALL_S, "the limb has ended", 0.01)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in b"ZX"
    except FileNotFoundError:
        return False
