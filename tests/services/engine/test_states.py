"""Models that keep states: which are handed over, served without handoffs, or refused."""

import warnings

import pytest
from vllm.platforms import current_platform

from baton.services.config import load
from baton.services.engine.build import EnginePlan, build_config
from baton.services.errors import ConfigError
from harness.architectures.registry import ARCHITECTURES

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="arguments of CPUs")


def built(name, *, needs_handoffs=True, **engine):
    one = ARCHITECTURES[name]
    target = {"model": str(one.target(one.checkpoint())), "dtype": one.dtype, "max_model_len": 256}
    settings = load({"engine": target | engine})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_config(EnginePlan(settings, "w", "f00", needs_handoffs=needs_handoffs))


@pytest.mark.parametrize(("name", "cached"), [("mtp-qwen3-next", False), ("ngram-gemma3", True)])
def test_windows_and_states_without_a_prefix_cache_are_handed_over(name, cached):
    config = built(name, enable_prefix_caching=cached)
    assert config.kv_transfer_config.kv_connector == "BatonConnector"
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_states_with_a_prefix_cache_are_refused():
    with pytest.raises(
        ConfigError, match=r"^engine\.enable_prefix_caching \(value true\): model .* keeps states"
    ):
        built("mtp-qwen3-next")
    assert built("mtp-qwen3-next", needs_handoffs=False).kv_transfer_config is None
