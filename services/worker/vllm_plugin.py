"""What vLLM loads in every process of an engine, tensor-parallel ranks included.

vLLM finds it by the entry point `baton` of the group `vllm.general_plugins`.
"""

from __future__ import annotations

from baton.services.worker import process, vllm_continuation


def register() -> None:
    """Called by vLLM, once a process; harmless when called again."""
    vllm_continuation.install()
    process.follow_engine_process()
