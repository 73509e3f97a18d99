"""Requests with LoRA adapters, handed over, in one batch with others, and with drafts.

The answers are compared with those of transformers, on weights with the adapter merged into them.
"""

import json
import shutil
import warnings
from dataclasses import dataclass

import pytest
from vllm.lora.request import LoRARequest

from baton.protos.worker_pb2 import Failed, FollowReply
from baton.services.config import EngineSettings
from baton.services.engine.adapters import read_adapters
from harness.adapters import adapter
from harness.checkpoints import tiny_qwen2
from harness.support import eventually
from harness.workers import START_TIMEOUT_S, Worker, fleet
from tests.services.worker.router import DECODE, PREFILL, connected, kept, prompt, request, telling

WRITTEN = 24
BASE, FIRST, SECOND = "", "first", "second"
NAMES = (BASE, FIRST, SECOND)
PROMPTS = [prompt(70, seed=61), prompt(16, seed=62) * 6]  # the second is repetitive, so n-grams match
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Pair:
    prefill: Worker
    decode: Worker
    fingerprints: dict[str, str]
    answers: dict[str, list[list[int]]]  # adapter -> answer to each prompt

    def request(self, request_id, name, tokens, **params):
        """Return a request as a router sends it, with the fingerprint instead of a path."""
        core = request(request_id, tokens, **{"max_tokens": WRITTEN, **params})
        if name:
            core.lora_request = LoRARequest(name, 1, self.fingerprints[name])
        return core


def with_transformers(model, folder):
    """Return transformers' greedy answers to the prompts, with an adapter merged into the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if folder is not None:
            config = json.loads((folder / "adapter_config.json").read_text())
            tensors = load_file(folder / "adapter_model.safetensors")
            for name, down in tensors.items():
                if ".lora_A." in name:
                    up = tensors[name.replace("lora_A", "lora_B")]
                    path = name.removeprefix("base_model.model.").partition(".lora_A")[0]
                    module = whole.get_submodule(path)
                    module.weight.data += config["lora_alpha"] / config["r"] * up @ down
        whole.generation_config.eos_token_id = None
        found = []
        for tokens in PROMPTS:
            wholly = whole.generate(torch.tensor([tokens]), max_new_tokens=WRITTEN, do_sample=False)
            found.append(wholly[0, len(tokens) :].tolist())
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Start both sides, with copies of the same adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_qwen2(folder / "tiny")
    folders = {name: adapter(folder / name, model, seed=n) for n, name in enumerate((FIRST, SECOND), 1)}
    copies = {name: shutil.copytree(one, folder / "copy" / name) for name, one in folders.items()}

    def engine(adapters):
        lora = {"adapters": {name: str(path) for name, path in adapters.items()}}
        return {"lora": lora, "speculative_config": DRAFTS, "max_num_seqs": 16}

    answers = {name: with_transformers(model, folders.get(name)) for name in NAMES}
    with fleet(model, folder) as workers:
        prefill = workers.start("prefill", engine=engine(folders))
        decode = workers.started("mixed", engine=engine(copies))
        eventually(prefill.serving, START_TIMEOUT_S, "the prefill worker serves")
        settings = EngineSettings(model=str(model), **engine(folders))
        yield Pair(prefill, decode, {one.name: one.fingerprint for one in read_adapters(settings)}, answers)


async def test_two_adapters_and_the_base_model_in_one_batch(pair):
    """Each has its own answer, handed over and with drafts."""
    assert len({str(answers) for answers in pair.answers.values()}) == len(NAMES)
    cores = {(name, n): pair.request(f"{name} {n}", name, PROMPTS[n]) for n in (0, 1) for name in NAMES}
    async with connected(pair.prefill.address) as source, connected(pair.decode.address) as target:
        for core in cores.values():
            await source.start(core, PREFILL)
        begun = {key: await source.end(core.request_id) for key, core in cores.items()}
        for key, core in cores.items():
            assert begun[key].saved is not None
            await target.start(core, DECODE, source=source.source(core))
        rests = {key: await target.end(core.request_id) for key, core in cores.items()}
    for (name, n), rest in rests.items():
        assert rest.failed is None
        assert rest.admitted is not None
        assert begun[name, n].tokens + rest.tokens == pair.answers[name][n], (name, n)
    drafts = [rests[name, 1].drafts for name in NAMES]
    assert all(one.num_draft_tokens > 0 for one in drafts)
    assert sum(accepted * steps for one in drafts for accepted, steps in enumerate(one.histogram)) > 0


@pytest.mark.parametrize(("kind", "first_step"), [("right", 4), ("wrong", 1), ("no tokens", 1)])
async def test_the_first_step_verifies_drafts_of_the_prefill_worker(pair, kind, first_step):
    whole = pair.answers[BASE][1]
    core = pair.request(f"first drafts: {kind}", BASE, PROMPTS[1])
    async with connected(pair.prefill.address) as source, connected(pair.decode.address) as target:
        begun = await source.run(core, PREFILL)
        complete = await kept(source.source(core))
        drafts = {
            "right": whole[1:6],
            "wrong": [(token + 1) % 250 for token in whole[1:4]],
            "no tokens": [2**32 - 1, *whole[1:4]],
        }[kind]
        del complete.draft_token_ids[:]
        complete.draft_token_ids.extend(drafts)
        async with telling(source.source(core), FollowReply(complete=complete)) as other:
            rest = await target.run(core, DECODE, source=other)
    assert begun.tokens + rest.tokens == whole
    assert rest.steps[0] == first_step


async def test_the_prefill_worker_drafts_for_the_decode_worker(pair):
    repeated = prompt(16, seed=62)
    core = pair.request("drafts made", BASE, PROMPTS[1], allowed_token_ids=sorted(set(repeated)))
    async with connected(pair.prefill.address) as source, connected(pair.decode.address) as target:
        whole = (await target.run(core, DECODE)).tokens
        core.request_id = "drafts made elsewhere"
        begun = await source.prefill(core)
        drafts = list((await kept(source.source(core))).draft_token_ids)
        assert 0 < len(drafts) <= DRAFTS["num_speculative_tokens"]  # drafted from the earlier occurrence
        rest = await target.run(core, DECODE, source=source.source(core))
    assert begun.tokens + rest.tokens == whole
    assert rest.drafts.num_draft_tokens >= len(drafts)


async def test_adapters_do_not_share_cached_kv(pair):
    """The same prompt for each adapter, twice, so that the second round hits the cache."""
    async with connected(pair.decode.address) as stream:
        for turn in range(2):
            for name in NAMES:
                core = pair.request(f"cached {turn} {name}", name, PROMPTS[0])
                assert (await stream.run(core, DECODE)).tokens == pair.answers[name][0], (turn, name)


async def test_a_request_is_resumed_with_its_adapter(pair):
    """After a failure, with its tokens so far and without KV."""
    whole = pair.answers[FIRST][0]
    async with connected(pair.decode.address) as stream:
        core = pair.request("goes on", FIRST, PROMPTS[0])
        assert (await stream.run(core, DECODE, written=whole[:7])).tokens == whole[7:]


@pytest.mark.parametrize(
    ("name", "fingerprint", "why"),
    [
        ("third", "f00", "this worker does not have the adapter 'third' (engine.lora)"),
        (FIRST, "f00", "the files of the adapter 'first' differ between this worker and the router"),
    ],
)
async def test_an_unknown_adapter_is_refused(pair, name, fingerprint, why):
    core = request(f"not there {name}", PROMPTS[0])
    core.lora_request = LoRARequest(name, 1, fingerprint)
    async with connected(pair.prefill.address) as stream:
        failed = (await stream.run(core, PREFILL)).failed
    assert (failed.code, failed.message) == (Failed.CODE_INVALID, why)
