"""What vLLM loads in every process of an engine, tensor-parallel ranks included.

vLLM finds it by the entry point `baton` of the group `vllm.general_plugins`.
"""

from __future__ import annotations

from baton.services import logs
from baton.services.engine import process
from baton.services.engine.patches import (
    continuation,
    cpu,
    drafts_v1,
    idle_drafter,
    step_times,
    torchvision,
    undrafted,
    verify_v1,
)


def register() -> None:
    """Called by vLLM, once a process; harmless when called again."""
    logs.follow()
    continuation.install()
    cpu.install()
    torchvision.install()
    idle_drafter.install()
    drafts_v1.install()
    undrafted.install()
    verify_v1.install()
    step_times.install()
    process.follow_engine_process()
