"""vLLM arguments that are refused before the engine is built."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from vllm import envs, platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.interface import UnspecifiedPlatform

from baton.services.config import EngineSettings, load
from baton.services.engine.args import check_model, engine_args
from baton.services.engine.build import EnginePlan, build_config
from baton.services.errors import ConfigError, StartError
from harness.checkpoints import byte_tokenizer
from harness.deployment import MODEL

SPLITS = [
    ("decode_context_parallel_size", "-dcp"),
    ("prefill_context_parallel_size", "-pcp"),
]


@pytest.mark.parametrize(("name", "short"), SPLITS)
def test_unserved_ways_to_split_a_model_are_refused(name: str, short: str) -> None:
    for key in (name, f"--{name.replace('_', '-')}", short, short[1:]):
        with pytest.raises(ConfigError, match=f"{name} is not served; leave it out") as refused:
            check_model(EngineSettings(model=str(MODEL), extra={key: 2}))
        assert str(refused.value).startswith(f"engine.extra.{key}: ")


def test_a_machine_on_which_vllm_finds_no_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_engine_cannot_be_one_rank_of_several(name: str) -> None:
    for key in (name, f"--{name.replace('_', '-')}"):
        with pytest.raises(ConfigError, match="more workers") as refused:
            check_model(EngineSettings(model=str(MODEL), extra={key: 1}))
        assert str(refused.value).startswith(f"engine.extra.{key}")


@pytest.mark.parametrize("name", [name for name in envs.environment_variables if name.startswith("VLLM_DP_")])
def test_nor_can_a_variable_make_it_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=rf"^{name} is set \(value '2'\).*run more workers"):
        check_model(EngineSettings(model=str(MODEL)))


@pytest.mark.parametrize("name", ["enable_eplb", "enable_dbo"])
def test_arguments_that_kill_a_cpu_engine_are_refused(name: str) -> None:
    settings = load({"engine": {"model": str(MODEL), "extra": {name: True}}})
    with pytest.raises(ConfigError, match=rf"^engine\.extra\.{name} \(value True\): vLLM's CPU build"):
        build_config(EnginePlan(settings, "w", "f", needs_handoffs=False))


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
    ],
)
def test_arguments_with_a_setting_of_their_own_are_refused(key: str, setting: str) -> None:
    """Otherwise a worker would expect an engine of another shape."""
    with pytest.raises(ConfigError, match=rf"is not for you to set: use engine\.{setting}"):
        check_model(EngineSettings(model=str(MODEL), extra={key: 2}))


def test_a_multi_modal_model_is_served_as_its_language_model(tmp_path: Path) -> None:
    """Images cannot reach a worker, so none are prepared and no encoder is loaded."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    text = {
        "model_type": "qwen2", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "image_size": 56,
        "patch_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    config |= {"text_config": text, "vision_config": vision}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer(tmp_path, 512)
    model = AsyncEngineArgs(**engine_args(EngineSettings(model=str(tmp_path)))).create_model_config()
    assert model.is_multimodal_model
    assert model.multimodal_config is not None
    assert model.multimodal_config.get_limit_per_prompt("image") == 0


@pytest.mark.parametrize("key", ["otlp_traces_endpoint", "--otlp-traces-endpoint", "collect_detailed_traces"])
def test_vllms_own_traces_are_refused(key: str) -> None:
    """An engine would accept the key and export nothing."""
    with pytest.raises(ConfigError, match=r"is not for you to set: use tracing\.endpoint"):
        check_model(EngineSettings(model=str(MODEL), extra={key: "http://127.0.0.1:4317"}))
