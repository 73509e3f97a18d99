"""Arguments of vLLM's that are refused before vLLM is imported."""

from __future__ import annotations

import pytest

from baton.services.config import EngineSettings
from baton.services.engine.args import check_model
from baton.services.errors import ConfigError
from harness.deployment import MODEL

SPLITS = [
    ("pipeline_parallel_size", "-pp"),
    ("decode_context_parallel_size", "-dcp"),
    ("prefill_context_parallel_size", "-pcp"),
]


@pytest.mark.parametrize(("name", "short"), SPLITS)
def test_ways_to_split_a_model_that_are_not_served(name: str, short: str) -> None:
    for key in (name, f"--{name.replace('_', '-')}", short, short[1:]):
        with pytest.raises(ConfigError, match=f"{name} is not served; leave it out") as refused:
            check_model(EngineSettings(model=str(MODEL), extra={key: 2}))
        assert str(refused.value).startswith(f"engine.extra.{key}: ")


@pytest.mark.parametrize("key", ["tensor_parallel_size", "tp", "--tensor-parallel-size"])
def test_what_has_a_setting_of_its_own(key: str) -> None:
    """Past it, a worker would take its engine for one of a single rank."""
    with pytest.raises(ConfigError, match=r"is not for you to set: use engine\.tensor_parallel_size"):
        check_model(EngineSettings(model=str(MODEL), extra={key: 2}))


@pytest.mark.parametrize("key", ["otlp_traces_endpoint", "--otlp-traces-endpoint", "collect_detailed_traces"])
def test_vllms_own_traces_are_the_routers_business(key: str) -> None:
    """An engine would accept the key, and export nothing."""
    with pytest.raises(ConfigError, match=r"is not for you to set: use tracing\.endpoint"):
        check_model(EngineSettings(model=str(MODEL), extra={key: "http://127.0.0.1:4317"}))
