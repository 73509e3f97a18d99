"""`baton ray up` with a decode gang on a real Ray head: one reservation, and a life and an end together.

`WHOLE_TABLE=1 make test ARGS=tests/e2e/test_ray_gangs.py` runs it. Otherwise test_gangs.py tests gangs in
`baton up`, whose parts `baton node` runs as well, and tests/services/ray tests their reservations.
"""

import asyncio
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import yaml

from harness.architectures.experts import deepseek_v3
from harness.architectures.language import prompt
from harness.deployment import MODEL_NAME
from harness.gangs import plain_answers
from harness.greedy import GREEDY, ask
from harness.netns import why_not
from harness.ray_head import RayHead, ray_head
from harness.ray_hosts import ray_hosts
from harness.support import BATON, CALL_S, PATIENCE, PYTHON, ROOT, eventually, free_port, gone, ran, running

pytestmark = pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: Ray starts twice")

START_S = 150.0
LONG, WRITTEN = 600, 24
# Kills the process with this title.
KILL = """
import psutil
for one in psutil.process_iter(["cmdline"]):
    if " ".join(one.info["cmdline"] or []).strip() == "baton %s":
        one.kill()
"""
MTP = {"method": "deepseek_mtp", "num_speculative_tokens": 2}
GANG = {"data_parallel_size": 2, "enable_expert_parallel": True}


@dataclass
class Served:
    head: RayHead
    port: int
    log: Path
    prompts: list[list[int]]
    expected: list[list[int]]  # a plain engine's answers

    @property
    def text(self):
        return self.log.read_text()

    def baton(self, *command):
        address = ("--address", self.head.address)
        done = ran(BATON, "ray", *command, *address, env=self.head.environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def states(self):
        return {part["name"]: part["state"] for part in json.loads(self.baton("status", "--json"))["parts"]}

    def members(self):
        """Return the processes of the first gang's workers, in the order of their ranks."""
        every = self.head.parts()
        return [every[name] for rank in range(2) if (name := f"decode-0.r{rank}") in every]

    def client(self):
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", timeout=CALL_S, max_retries=0)

    async def check(self, *numbers):
        async with self.client() as client:
            asked = (ask(client, self.prompts[number], len(self.expected[number])) for number in numbers)
            assert await asyncio.gather(*asked) == [self.expected[number] for number in numbers]

    async def check_stream(self, begun):
        """Check the long answer as a stream. `begun` is set after some of its tokens."""
        got = []
        async with self.client() as client:
            asked = {"model": MODEL_NAME, "prompt": self.prompts[0], "max_tokens": LONG, **GREEDY}
            async for chunk in await client.completions.create(**asked, stream=True):
                got += (chunk.choices[0].model_extra or {}).get("token_ids") or []
                if len(got) > WRITTEN:
                    begun.set()
        assert got == self.expected[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("ray-gangs"), free_port()
    model, file, log = folder / "model", folder / "cluster.yaml", folder / "up.log"
    deepseek_v3(model)
    prompts = [prompt(number) for number in range(3)]
    expected = plain_answers(model, prompts, (LONG, WRITTEN, WRITTEN), speculative_config=MTP)
    file.write_text(yaml.safe_dump(configuration(model, port, folder)))
    with ray_head("--num-cpus=4") as head:
        command = [BATON, "ray", "up", file, "--address", head.address]
        one = Served(head, port, log, prompts, expected)
        options = {"env": head.environment, "cwd": ROOT}
        with running(command, lambda: "\nReady." in one.text, START_S, log, **options) as up:
            yield one
            one.baton("down")
            assert up.wait(CALL_S) == 0, one.text
        assert not one.members()


def configuration(model, port, folder):
    loading = {"model_id": MODEL_NAME, "model_source": str(model)}
    kwargs = {"dtype": "float32", "max_model_len": 1024, "speculative_config": MTP}
    half = {"bundle_per_worker": {"CPU": 0.5}}
    return {
        "prefill_config": {"model_loading_config": loading, "engine_kwargs": kwargs},
        "decode_config": {
            "model_loading_config": loading,
            "engine_kwargs": kwargs | GANG,
            "placement_group_config": half,
        },
        "engine": {"kv_cache_gib": 0.25},
        "router": {"host": "127.0.0.1", "port": port},
        "handoff": {"staging_mib": 64},
        "security": {"ca": str(folder / "ca")},
        "ops": {"listen": ""},
    }


def test_a_gang_answers_like_one_engine_and_comes_back_as_one(served):
    """A member is killed during a stream: the other ends too, and both return."""
    assert "decode-0     asks for 1 CPU" in served.text

    async def run():
        await served.check(1, 2, 1, 2)
        before = served.members()
        assert len(before) == 2
        begun = asyncio.Event()
        long = asyncio.create_task(served.check_stream(begun))
        async with asyncio.timeout(CALL_S):
            await begun.wait()
        assert not long.done()
        before[1].kill()
        await asyncio.to_thread(eventually, lambda: gone(before), 2 * PATIENCE, "both have ended")
        await long
        await asyncio.to_thread(eventually, lambda: ready(served, before), START_S, "the gang is back", 0.5)
        await served.check(1, 2)

    asyncio.run(run())


def ready(served, before):
    now = served.members()
    return len(now) == 2 and not set(now) & set(before) and set(served.states().values()) == {"ready"}


def test_a_scale_counts_gangs(served):
    """A second gang joins and leaves under a stream."""

    async def run():
        long = asyncio.create_task(served.check(0, 1, 2))
        await asyncio.to_thread(served.baton, "scale", "decode=2")
        joined = {"decode-1.r0", "decode-1.r1"}

        def there():
            states = served.states()
            return joined <= states.keys() and set(states.values()) == {"ready"}

        await asyncio.to_thread(eventually, there, START_S, "a second gang is ready", 0.5)
        await long
        long = asyncio.create_task(served.check(0, 1, 2, 1, 2))
        await asyncio.to_thread(served.baton, "scale", "decode=1")
        await asyncio.to_thread(
            eventually, lambda: "decode-1     has left" in served.text, START_S, "it leaves"
        )
        await long

    asyncio.run(run())
    assert "decode-1.r0" not in served.states()
    assert "died" not in served.text.partition("decode-1 ")[2]  # it drained


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.timeout(400)
def test_an_engine_over_two_nodes_of_ray(served, tmp_path):
    """Decode has a rank on each host; it ends with its second host's process, and comes back."""
    model = str(served.log.parent / "model")
    half = {"placement_group_config": {"bundle_per_worker": {"CPU": 0.5}}}
    long = {"engine_kwargs": {"tensor_parallel_size": 2, "nodes": 2}, **half}
    sections = {
        "engine": {"model": model, "served_model_name": MODEL_NAME, "dtype": "float32", "kv_cache_gib": 0.25},
        "prefill_config": {"label_selector": {"host": "first"}, **half},
        "decode_config": long,
        "security": {"plain_ranks": True},
    }
    sections["engine"] |= {"max_model_len": 1024, "speculative_config": MTP}
    with ray_hosts(tmp_path, **sections) as hosts, hosts.forwarded() as url:

        async def check():
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", timeout=CALL_S, max_retries=0
            ) as client:
                asked = (ask(client, served.prompts[number], WRITTEN) for number in (1, 2))
                assert await asyncio.gather(*asked) == served.expected[1:]

        asyncio.run(check())
        where = {part["name"]: (part["node"], part["state"]) for part in hosts.status()["parts"]}
        first, limb = where["decode-0.r0"], where["decode-0.r1"]
        assert {first, limb} == {("first", "ready"), ("second", "ready")}
        killed = KILL % ("decode-0.r1",)
        host = hosts.first if limb[0] == "first" else hosts.second
        host.run([str(PYTHON), "-c", killed], CALL_S)

        def again():
            return len(re.findall(r"decode-0\.r0 +ready", hosts.text)) == 2

        eventually(again, START_S, "the engine is back", 0.5)
        asyncio.run(check())
