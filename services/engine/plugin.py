"""Baton's plug-in, which vLLM loads in every process of an engine, tensor-parallel ranks included.

vLLM finds it by the entry point `baton` of the group `vllm.general_plugins`.
"""

from __future__ import annotations

from baton.services import logs
from baton.services.engine import process
from baton.services.engine.patches import table


def register() -> None:
    """Set this process up: its logs, the patches, its end. vLLM calls it once; harmless when called again."""
    logs.follow()
    table.install()
    process.follow_engine_process()
