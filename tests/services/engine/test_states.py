"""Models that keep states: which are handed over, served without handoffs, or refused."""

import pytest
from vllm.platforms import current_platform

from baton.services.errors import ConfigError
from harness.architectures.registry import ARCHITECTURES
from tests.services.engine.plans import built

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="arguments of CPUs")


def config_of(name, *, needs_handoffs=True, **engine):
    one = ARCHITECTURES[name]
    target = one.target(one.checkpoint())
    return built(target, needs_handoffs=needs_handoffs, dtype=one.dtype, max_model_len=256, **engine)


@pytest.mark.parametrize(("name", "cached"), [("mtp-qwen3-next", False), ("ngram-gemma3", True)])
def test_windows_and_states_without_a_prefix_cache_are_handed_over(name, cached):
    config = config_of(name, enable_prefix_caching=cached)
    assert config.kv_transfer_config.kv_connector == "BatonConnector"
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_states_with_a_prefix_cache_are_refused():
    with pytest.raises(
        ConfigError, match=r"^engine\.enable_prefix_caching \(value true\): model .* keeps states"
    ):
        config_of("mtp-qwen3-next")
    assert config_of("mtp-qwen3-next", needs_handoffs=False).kv_transfer_config is None
