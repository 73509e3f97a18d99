"""Who gets a request: filter the workers, score the rest in [0, 1], pick one.

    base.py        the three interfaces, and the side of a worker that a request would use
    registry.py    names -> classes, loaded when used; a new policy is one class and one registration
    filters.py scorers.py pickers.py   what is built in
    choose.py      the order in which all this is asked, and what is preferred

After llm-d's inference scheduler: filter, score, pick, each a small class.
"""

from baton.scheduler.policy.choose import Choice, NoChoice, Policy
from baton.scheduler.policy.registry import PolicyConfig

__all__ = ["Choice", "NoChoice", "Policy", "PolicyConfig"]
