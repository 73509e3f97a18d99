"""Routes of vLLM's that are not offered: 404 here.

They are for one engine's administrators and for models of another kind, or for developers
(VLLM_SERVER_DEV_MODE): those end requests of others, empty the caches of all and show the configuration.

Leans on: the Starlette app that vllm.entrypoints.launchers.app.build_app returns (routes: path, endpoint),
and the modules of vLLM's routes, which are named here.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Mount

_PATHS = (
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/kv_event_sources",
    "/v1/systemone",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_MODULES = (
    "vllm.entrypoints.rl.",
    "vllm.entrypoints.serve.dev.",
    "vllm.entrypoints.serve.elastic_ep.",
    "vllm.entrypoints.serve.fault_tolerance.",
    "vllm.entrypoints.serve.profile.",
)


def is_left_out(route: BaseRoute) -> bool:
    """Return whether a route of vLLM's is not offered, or is its second /metrics: one without OpenMetrics.

    The first, which is mounted, serves what a scraper asks for, exemplars too.
    """
    path = getattr(route, "path", "")
    module = getattr(getattr(route, "endpoint", None), "__module__", None) or ""
    return (
        path in _PATHS
        or f"{module}.".startswith(_MODULES)
        or (path == "/metrics" and not isinstance(route, Mount))
    )
