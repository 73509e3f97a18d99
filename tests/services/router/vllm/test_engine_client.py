from dataclasses import asdict
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from vllm.lora.request import LoRARequest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Adapter
from baton.services.engine import wire
from baton.services.engine.step_checks import StepLimits
from baton.services.router.http.admission import Admission, current_admission
from baton.services.router.metrics import RouterMetrics
from baton.services.router.tenancy import Tenancy
from baton.services.router.vllm.engine_client import RefusedByRouter
from baton.services.router.vllm.frontend import RelayLLM
from baton.services.tenants.model import Caller, Limits, Tenant
from baton.services.tenants.quotas import Quotas
from harness.fake_worker import FakeWorker
from harness.router import Answer, engine_request
from harness.scheduling import capacity
from tests.services.engine.test_images import feature


@pytest.mark.parametrize(
    "name", ["sleep_async", "reset_prefix_cache_async", "pause_scheduler_async", "get_status"]
)
async def test_administration_is_refused(cluster, name):
    with pytest.raises(RefusedByRouter, match="not offered by the router"):
        await getattr(cluster.client, name)()


@pytest.mark.parametrize(
    "change",
    [
        {"mm_features": [feature(0, 1, modality="video")]},
        {"mm_features": [feature(0, 1, data=None)]},
        {"lora_request": LoRARequest("unknown", 1, "/a/path")},
        {"resumable": True},
        {"prompt_embeds": 1},
        {"sampling_params": None},
    ],
)
async def test_unsupported_requests_are_refused(cluster, change):
    request = engine_request("q", [1], 4)
    for key, value in change.items():
        setattr(request, key, value)
    with pytest.raises(RefusedByRouter, match="served here") as refused:
        await cluster.client.add_request_async(request)
    assert refused.value.http_status == 400


async def test_tenants_share_no_prefix(cluster):
    """The same salt separates them in a worker's cache and in the block names for placement."""
    worker = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED, step_s=0.005))
    tenancy = Tenancy(Quotas(None, "r1"), RouterMetrics(CollectorRegistry()))
    prompt = list(range(64))
    seen = {}
    for tenant in ("acme", "globex", "acme", ""):
        caller = Caller(tenant, tenant, Limits(), Tenant())
        token = current_admission.set(Admission(request=await tenancy.enter(caller)))
        name = f"q{sum(seen.values())}"
        await cluster.send(name, prompt, 20)
        current_admission.reset(token)
        hashes = cluster.client._relays[name].state.prefix.keys
        await cluster.answer(name)
        salt = wire.decode_request(worker.seen.starts[-1].engine_request).cache_salt
        assert len(hashes) == 4
        seen[salt, hashes] = seen.get((salt, hashes), 0) + 1
    assert sorted(seen.values()) == [1, 1, 2]
    assert len({salt for salt, _ in seen}) == len({hashes for _, hashes in seen}) == 3


async def test_an_adapter_is_sent_by_its_name_and_files(cluster):
    """Neither a path on the router's machine nor the router's own number is sent."""
    cluster.remake(adapters={"sql": Adapter("sql", "f5")})
    known, other = LoRARequest("sql", 7, "/adapters/sql"), LoRARequest("chat", 8, "/adapters/chat")
    assert await cluster.client.add_lora_async(known) is True
    with pytest.raises(RefusedByRouter, match="not offered by the router"):
        await cluster.client.add_lora_async(other)
    without = await cluster.members.add(FakeWorker("without", pb.ROLE_MIXED))
    worker = FakeWorker("has it", pb.ROLE_MIXED)
    worker.adapters = {"sql": "f5"}
    await cluster.members.add(worker)
    for number in range(4):
        request = engine_request(f"q{number}", [1, 2], 4)
        request.lora_request = known
        cluster.got[f"q{number}"] = Answer()
        await cluster.client.add_request_async(request)
        assert (await cluster.answer(f"q{number}")).error is None
    assert not without.seen.starts
    sent = wire.decode_request(worker.seen.starts[0].engine_request)
    assert sent.lora_request == known
    assert (sent.lora_request.lora_int_id, sent.lora_request.lora_path) == (1, "f5")


async def test_parameters_that_would_break_a_step_are_refused_before_placement(cluster):
    worker = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    cluster.remake(steps=StepLimits(vocabulary=512, runner_v2=True))
    for fields, words in (
        ({"logit_bias": {1: 1.0, 512: 1.0}}, "logit_bias names token 512; the model's vocabulary has 512"),
        ({"allowed_token_ids": [7] * 1025}, "allowed_token_ids has 1025 entries; 1024 are allowed"),
    ):
        request = engine_request("q", [1], 4)
        for name, value in fields.items():
            setattr(request.sampling_params, name, value)
        with pytest.raises(RefusedByRouter, match=words) as refused:
            await cluster.client.add_request_async(request)
        assert refused.value.http_status == 400
    assert not worker.seen.starts


async def test_the_router_adopts_its_workers_limits(cluster):
    """An older worker sends none, so the router's own stay."""
    before = cluster.client.limits.steps
    llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2048), engine_core=cluster.client)
    llm.vllm_config = SimpleNamespace(cache_config=SimpleNamespace())
    RelayLLM.learn(llm, capacity())
    assert cluster.client.limits.steps == before
    told = StepLimits(512, runner_v2=True, drafts_always=True, prompt_logprobs=False)
    RelayLLM.learn(llm, capacity(steps=pb.StepLimits(**asdict(told))))
    assert cluster.client.limits.steps == told
