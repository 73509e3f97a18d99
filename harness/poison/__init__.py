"""A vLLM plug-in that lets requests break an engine's step, and the `vllm_xargs` of such requests.

Put this folder on a deployment's PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
MARK = "poison"


def dose(kind: str, where: str = "sample", after: int = 0) -> dict[str, str]:
    """Return the `vllm_xargs` of a request that breaks a step.

    kind: alone; pair (only with another such request); sticky (like a lost device); kill (the process)
    where: the part of the step: schedule, execute, forward, sample, draft, update or post
    after: the number of output tokens before it acts
    """
    return {MARK: f"{kind}:{where}:{after}"}
