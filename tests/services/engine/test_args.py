"""vLLM arguments that are refused before the engine is built."""

import dataclasses

import pytest
from vllm import envs, platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.interface import UnspecifiedPlatform

from baton.services.config import EngineSettings
from baton.services.engine.args import check_model, engine_args, takes_images
from baton.services.errors import ConfigError, StartError
from harness.architectures.registry import VISIONS
from harness.deployment import MODEL
from tests.services.engine.plans import built

SPLITS = [("decode_context_parallel_size", "-dcp"), ("prefill_context_parallel_size", "-pcp")]


@pytest.mark.parametrize(("name", "short"), SPLITS)
def test_unserved_ways_to_split_a_model_are_refused(name, short):
    for key in (name, f"--{name.replace('_', '-')}", short, short[1:]):
        with pytest.raises(ConfigError, match=f"{name} is not served; leave it out") as refused:
            check_model(EngineSettings(model=str(MODEL), extra={key: 2}))
        assert str(refused.value).startswith(f"engine.extra.{key}: ")


def test_a_machine_on_which_vllm_finds_no_device_is_refused(monkeypatch):
    """This happens without NVML. vLLM itself would fail with a traceback."""
    monkeypatch.setattr(platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(StartError, match=r"no GPU here: NVML .* `utility`"):
        engine_args(EngineSettings(model=str(MODEL)))


ALL = [field.name for field in dataclasses.fields(AsyncEngineArgs)]


@pytest.mark.parametrize(
    "name",
    [name for name in ALL if name.startswith("data_parallel_") and name != "data_parallel_size"]
    + ["node_rank", "master_addr"],
)
def test_an_engine_cannot_be_one_rank_of_several(name):
    for key in (name, f"--{name.replace('_', '-')}"):
        with pytest.raises(ConfigError, match="more workers") as refused:
            check_model(EngineSettings(model=str(MODEL), extra={key: 1}))
        assert str(refused.value).startswith(f"engine.extra.{key}")


@pytest.mark.parametrize("name", [name for name in envs.environment_variables if name.startswith("VLLM_DP_")])
def test_nor_can_a_variable_make_it_one(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=rf"^{name} is set \(value '2'\).*run more workers"):
        check_model(EngineSettings(model=str(MODEL)))


@pytest.mark.parametrize("name", ["enable_eplb", "enable_dbo"])
def test_arguments_that_kill_a_cpu_engine_are_refused(name):
    with pytest.raises(ConfigError, match=rf"^engine\.extra\.{name} \(value True\): vLLM's CPU build"):
        built(extra={name: True})


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("tensor_parallel_size", "tensor_parallel_size"),
        ("tp", "tensor_parallel_size"),
        ("--tensor-parallel-size", "tensor_parallel_size"),
        ("pipeline_parallel_size", "pipeline_parallel_size"),
        ("-pp", "pipeline_parallel_size"),
        ("data_parallel_size", "data_parallel_size"),
        ("dp", "data_parallel_size"),
        ("nnodes", "nodes"),
        ("-n", "nodes"),
        ("--enable-expert-parallel", "expert_parallel"),
        ("enable_lora", "lora"),
        ("max-loras", "lora"),
    ],
)
def test_arguments_with_a_setting_of_their_own_are_refused(key, setting):
    """With them a worker would expect an engine of another shape."""
    with pytest.raises(ConfigError, match=rf"is not for you to set: use engine\.{setting}"):
        check_model(EngineSettings(model=str(MODEL), extra={key: 2}))


@pytest.mark.parametrize(
    ("extra", "most"),
    [
        ({}, 999),
        ({"limit_mm_per_prompt": {"image": 3}}, 3),
        ({"limit_mm_per_prompt": {"image": 0}}, 0),
        ({"language_model_only": True}, 0),
    ],
)
def test_the_modalities_of_a_model(extra, most):
    llava = VISIONS["llava"]
    settings = EngineSettings(model=str(llava.target(llava.checkpoint())), extra=extra)
    model = AsyncEngineArgs(**engine_args(settings)).create_model_config()
    assert model.is_multimodal_model
    limits = [model.multimodal_config.get_limit_per_prompt(one) for one in ("image", "video", "audio")]
    assert limits == [most, 0, 0]
    assert takes_images(model) == (most > 0)


@pytest.mark.parametrize("key", ["otlp_traces_endpoint", "--otlp-traces-endpoint", "collect_detailed_traces"])
def test_vllms_own_traces_are_refused(key):
    """An engine would accept the key and export nothing."""
    with pytest.raises(ConfigError, match=r"is not for you to set: use tracing\.endpoint"):
        check_model(EngineSettings(model=str(MODEL), extra={key: "http://127.0.0.1:4317"}))
