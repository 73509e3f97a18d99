"""Choose the workers for a request: filter them, score the rest in [0, 1], pick one.

  base.py        the interfaces of a policy's parts, and the side of a request that a worker would take
  registry.py    names -> classes, loaded when used; other packages add theirs by entry points
  filters.py scorers.py pickers.py   the built-in parts
  speed.py       the speed at which a worker computes prompts
  choose.py      the order in which parts are asked, and the preferences

The filter-score-pick design, with a small class for each part, follows llm-d's inference scheduler.
"""

from baton.scheduler.policy.choose import NoChoice, Policy, WorkerChoice

__all__ = ["NoChoice", "Policy", "WorkerChoice"]
