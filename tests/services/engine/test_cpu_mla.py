"""MLA on CPUs with and without AMX, which is faked here."""

import warnings

import pytest
import torch
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from baton.services.errors import ConfigError
from harness.architectures.registry import ARCHITECTURES
from tests.services.engine.plans import built

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="back ends of CPUs")


@pytest.fixture(scope="module")
def model():
    one = ARCHITECTURES["mtp-deepseek-v3"]
    return one.target(one.checkpoint())


@pytest.fixture(params=[True, False], ids=["amx", "no-amx"])
def amx(monkeypatch, request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_general_plugins()  # first, because its patch would wrap the fake
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)
    return bool(request.param)


def config_of(model, dtype, **extra):
    engine = {"max_model_len": 256, "speculative_config": {"method": "mtp"}}
    return built(model, needs_handoffs=True, dtype=dtype, extra=extra, **engine)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_machine_uses_the_same_blocks(model, dtype, caplog):
    config = config_of(model, dtype)
    assert config.cache_config.block_size == 16
    assert "overriding" not in caplog.text
    for backend in (config.attention_config.backend, config.speculative_config.attention_backend):
        assert current_platform.get_attn_backend_cls(backend, Selection()).endswith("CPUMLABackend")


class Selection:
    """The parts of vLLM's AttentionSelectorConfig that matter on a CPU."""

    use_mla, use_sparse = True, False


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("amx", [True], indirect=True)
def test_amx_is_used_if_it_is_set(model):
    assert config_of(model, "bfloat16", attention_backend="AMX_MLA").cache_config.block_size == 32
    config = config_of(model, "bfloat16", attention_config={"backend": "AMX_MLA"})
    assert config.cache_config.block_size == 32


@pytest.mark.parametrize(
    ("dtype", "extra", "problem"),
    [
        ("float32", {"attention_backend": "amx_mla"}, "only in bfloat16, and engine.dtype is float32"),
        ("bfloat16", {"attention_backend": "AMX_MLA", "block_size": 16}, "value 16. is no multiple of 32"),
        ("bfloat16", {"attention_backend": "TRITON_MLA"}, "CPU_MLA or AMX_MLA"),
    ],
)
def test_impossible_settings_are_refused_before_the_model_loads(model, amx, dtype, extra, problem):
    without_amx = problem if problem.startswith("CPU_MLA") else "has no AMX"
    with pytest.raises(ConfigError, match=problem if amx else without_amx) as raised:
        config_of(model, dtype, **extra)
    assert "\n" not in str(raised.value)
