"""The plug-in that vLLM loads in every process of an engine, tensor-parallel ranks included.

vLLM finds it through the entry point `baton` of the group `vllm.general_plugins`.
"""

from __future__ import annotations

import sys

from baton.services import logs
from baton.services.engine import process
from baton.services.engine.patches import table

# At the first start of each worker, vLLM runs this module in a short-lived process that inspects a model
# class. The patches would import half of the engine there, which would make it take a third longer.
_INSPECTION = "vllm.model_executor.models.registry"


def register() -> None:
    """Configure logs, apply the patches, and make this process end with its engine. Idempotent."""
    logs.follow()
    if getattr(sys.modules["__main__"].__spec__, "name", "") != _INSPECTION:
        table.install()
    process.follow_engine_process()
