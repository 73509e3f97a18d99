"""The choice of workers for a request: filter them, score the rest in [0, 1], pick one.

    base.py        the interfaces of a policy's parts, and the side of a request that a worker would take
    registry.py    names -> classes, loaded when used; other packages add theirs by entry points
    filters.py scorers.py pickers.py   what is built in
    speed.py       the speed at which a worker computes prompts
    choose.py      the order in which all this is asked, and what is preferred

After llm-d's inference scheduler: filter, score, pick, each a small class.
"""

from baton.scheduler.policy.choose import NoChoice, Policy, WorkerChoice

__all__ = ["NoChoice", "Policy", "WorkerChoice"]
