"""Test how vLLM's errors are reworded. tests/e2e/test_bad_start.py has those of an engine that loads."""

import json
import warnings

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from baton.errors import BatonError
from baton.services.config import load
from baton.services.engine.refusals import LONGEST, reason
from baton.services.errors import ConfigError
from harness.deployment import MODEL

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from baton.services.engine.build import EnginePlan, _explaining, build_config
    from baton.services.router.vllm import frontend


class CacheConfig(BaseModel):
    gpu_memory_utilization: float = Field(0.9, le=1)
    max_num_seqs: int = 32

    @field_validator("max_num_seqs")
    @classmethod
    def _even(cls, value):
        if value % 2:
            raise ValueError("max_num_seqs must be\neven. See https://docs.vllm.ai/x for more details.")
        return value


def refusal(**values):
    with pytest.raises(ValidationError) as caught:
        CacheConfig(**values)
    return caught.value


def test_pydantics_frame_is_removed_and_names_are_translated():
    said = reason(refusal(max_num_seqs=3))
    named = "engine.max_num_seqs (--max-num-seqs)"
    assert said == f"{named}: {named} must be even."


def test_arguments_of_engine_extra_are_named_as_such():
    said = reason(refusal(gpu_memory_utilization=3), {"gpu_memory_utilization": 3, "seed": 1})
    assert said.startswith("engine.extra.gpu_memory_utilization: ")
    assert "kv_cache_gib" not in said


def test_long_lists_and_texts_are_cut():
    names = ", ".join(f"'A{number}'" for number in range(300))
    said = reason(ValueError(f"'Nope' is unknown, there are: [{names}]."))
    assert "'A11', ... (300 in all)]." in said
    assert len(reason(ValueError("x" * 2000))) == LONGEST


def test_there_is_always_a_reason():
    assert reason(KeyError("rope_theta")) == "KeyError: 'rope_theta'"
    assert reason(AssertionError()) == "AssertionError"
    assert reason(ConfigError("as it is")) == "as it is"


def refused(build, **engine):
    """Return why an engine or a router is not built with these settings."""
    settings = load({"engine": {"model": str(MODEL), "dtype": "float32", **engine}})
    with pytest.raises(BatonError) as caught, _explaining(settings.engine):
        build(settings)
    return str(caught.value)


def worker(settings):
    build_config(EnginePlan(settings, "worker", "fingerprint", needs_handoffs=True))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"max_model_len": 999999}, "engine.max_model_len (value 999999): the model takes at most 2048"),
        ({"tensor_parallel_size": 64}, "the engine has 64 ranks here (engine.tensor_parallel_size"),
        (
            {"max_num_batched_tokens": 32},
            "engine.max_num_batched_tokens (--max-num-batched-tokens) (32) must be greater than or equal to "
            "engine.max_num_seqs (--max-num-seqs) (64)",
        ),
        ({"extra": {"max_num_seqs": -3}}, "engine.extra.max_num_seqs: Input"),
        ({"extra": {"quantization": "fp8"}}, "does not go with engine.dtype (--dtype) float32"),
        ({"extra": {"device": "cuda"}}, "engine.extra.device: vLLM"),
    ],
    ids=str,
)
def test_vllm_refuses_a_worker(engine, said):
    assert said in refused(worker, **engine)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "nope"}, "names the model type 'nope', which transformers does not have"),
        ({"architectures": ["NopeForCausalLM"]}, "['NopeForCausalLM'] are not supported"),
    ],
    ids=str,
)
def test_vllm_refuses_a_model(tmp_path, config, said):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    changed = json.loads((MODEL / "config.json").read_text()) | config
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert said in refused(worker, model=str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"max_model_length": 4}, "engine.extra.max_model_length:"),
        ({"quantization": "nope"}, "Unknown quantization method: nope"),
        ({"enforce_eager": "maybe"}, "engine.extra.enforce_eager:"),
    ],
    ids=str,
)
def test_vllm_refuses_a_router(extra, said):
    assert said in refused(frontend.build_config, extra=extra)
