"""What vLLM loads in every process of an engine, tensor-parallel ranks included.

vLLM finds it by the entry point `baton` of the group `vllm.general_plugins`.
"""

from __future__ import annotations

from baton.services import logs
from baton.services.worker import (
    process,
    vllm_continuation,
    vllm_idle_drafter,
    vllm_mends,
    vllm_speculation,
    vllm_step_times,
    vllm_torchvision,
    vllm_undrafted,
    vllm_verify,
)


def register() -> None:
    """Called by vLLM, once a process; harmless when called again."""
    logs.follow()
    vllm_continuation.install()
    vllm_mends.install()
    vllm_torchvision.install()
    vllm_idle_drafter.install()
    vllm_speculation.install()
    vllm_undrafted.install()
    vllm_verify.install()
    vllm_step_times.install()
    process.follow_engine_process()
