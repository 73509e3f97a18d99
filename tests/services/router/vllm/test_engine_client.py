"""The requests and calls that the engine client refuses."""

from __future__ import annotations

from typing import Any

import pytest

from baton.services.router.vllm.engine_client import RefusedByRouter, RelayClient, without_reserved
from harness.router import Cluster, engine_request


@pytest.mark.parametrize(
    "name", ["sleep_async", "reset_prefix_cache_async", "collective_rpc_async", "add_lora_async"]
)
async def test_administration_is_refused_clearly(cluster: Cluster, name: str) -> None:
    with pytest.raises(RefusedByRouter, match="not offered by the router"):
        await getattr(cluster.client, name)()


def test_every_call_of_the_engine_client_is_there_or_refused() -> None:
    """A new vLLM may ask for more: it must not fall back to a bare NotImplementedError."""
    from vllm.v1.engine.core_client import EngineCoreClient

    asked = [name for name in vars(EngineCoreClient) if name.endswith("_async")]
    assert [name for name in asked if name not in vars(RelayClient)] == []


@pytest.mark.parametrize(
    "change",
    [
        {"mm_features": [1]},
        {"lora_request": 1},
        {"resumable": True},
        {"prompt_embeds": 1},
        {"sampling_params": None},
    ],
)
async def test_unsupported_requests_are_refused(cluster: Cluster, change: dict[str, Any]) -> None:
    request = engine_request("q", [1], 4)
    for key, value in change.items():
        setattr(request, key, value)
    with pytest.raises(RefusedByRouter, match="served here") as refused:
        await cluster.client.add_request_async(request)
    assert refused.value.http_status == 400


def test_without_reserved() -> None:
    mine = {"kv_transfer_params": {}, "ec_transfer_params": {}, "baton_x": 1}
    assert without_reserved({**mine, "a": 1}) == {"a": 1}
    assert without_reserved(mine) is None
    assert without_reserved(None) is None
