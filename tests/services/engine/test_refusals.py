"""Test how vLLM's errors are reworded. tests/e2e/test_bad_start.py has vLLM's real errors."""

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from baton.services.engine.refusals import LONGEST, reason
from baton.services.errors import ConfigError


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
