"""Refuse environment variables with which vLLM would let one client affect other clients' requests.

docs/security.md lists them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from baton.services.errors import ConfigError

RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
_OFF = ("", "0", "false")

REFUSED: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "every client could call vLLM's endpoints for developers: put the engine to "
    "sleep, run methods of its workers, empty its cache",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "data from a socket would be unpickled, and could run code",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "every client could have any path loaded as an adapter; name "
    "adapters in engine.lora",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "another model would answer requests for one that is not served",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "clients that send the same X-Request-Id would get each other's "
    "tokens",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "every answer would be logged; to see answers set "
    "router.frontend.enable_log_outputs",
    "VLLM_RAISE_ON_LOGIT_NANS": "one request with NaN in its logits would end the engine for all requests",
    "VLLM_V1_USE_OUTLINES_CACHE": "clients' grammars would fill a file without bound",
}


def is_set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in _OFF


def refuse_variables() -> None:
    """Raise ConfigError if any of the variables in REFUSED is on."""
    for name, why in REFUSED.items():
        if is_set(name):
            raise ConfigError(f"environment variable {name}={os.environ[name]}: {why}; unset it")
