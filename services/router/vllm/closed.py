"""Close vLLM routes that the router does not offer: they answer 404.

They are for administrators of a single engine, for other kinds of models, or for developers
(VLLM_SERVER_DEV_MODE). Developers' routes can end other clients' requests, empty all caches and show the
configuration.

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
    """Return whether a vLLM route is closed.

    So is the second of its two /metrics: the mounted one also serves OpenMetrics, with exemplars.
    """
    path = getattr(route, "path", "")
    module = getattr(getattr(route, "endpoint", None), "__module__", None) or ""
    return (
        path in _PATHS
        or f"{module}.".startswith(_MODULES)
        or (path == "/metrics" and not isinstance(route, Mount))
    )
