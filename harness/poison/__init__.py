"""Requests that break an engine's step: a vLLM plug-in, and how a request says what it does.

Put this folder on PYTHONPATH of a deployment. A request is poisonous by its `vllm_xargs`.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
MARK = "poison"


def dose(kind: str, where: str = "sample", after: int = 0) -> dict[str, str]:
    """Return the `vllm_xargs` of a request that breaks a step.

    kind: alone; pair (only beside another of this kind); sticky (as a device that is lost); kill (the process
    is killed, as by a fault in a kernel)
    where: schedule, execute, forward, sample, draft, update or post, of a step
    after: output tokens
    """
    return {MARK: f"{kind}:{where}:{after}"}
