"""Choose the workers for a request: filter them, score the rest in [0, 1], pick one.

The design, with a small class for each filter, scorer and picker, follows llm-d's inference scheduler.
"""

from baton.scheduler.policy.choose import NoChoice, Policy, WorkerChoice

__all__ = ["NoChoice", "Policy", "WorkerChoice"]
