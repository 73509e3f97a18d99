"""Load the parts of a placement policy by name. Other packages can register theirs: docs/extending.md."""

from __future__ import annotations

from typing import TypeVar

from baton.registry import Registry
from baton.scheduler.errors import BadPolicy
from baton.scheduler.policy.base import PolicyPart

Part = TypeVar("Part", bound=PolicyPart)

_HERE = __package__

PARTS: Registry[type[PolicyPart]] = Registry(
    "policy part",
    PolicyPart,
    {
        # filters
        "placeable": f"{_HERE}.filters:Placeable",
        "same_revision": f"{_HERE}.filters:SameRevision",
        "has_adapter": f"{_HERE}.filters:HasAdapter",
        "not_excluded": f"{_HERE}.filters:NotExcluded",
        "fits": f"{_HERE}.filters:Fits",
        "room": f"{_HERE}.filters:HasRoom",
        # pair filters
        "compatible": f"{_HERE}.filters:Compatible",
        # scorers
        "queued_prompt_tokens": f"{_HERE}.scorers:QueuedPromptTokens",
        "prefill_work": f"{_HERE}.scorers:PrefillWork",
        "held_tokens": f"{_HERE}.scorers:HeldTokens",
        "staging_room": f"{_HERE}.scorers:StagingRoom",
        "running_requests": f"{_HERE}.scorers:RunningRequests",
        "free_blocks": f"{_HERE}.scorers:FreeBlocks",
        # pickers
        "power_of_four": f"{_HERE}.pickers:PowerOfFour",
        "power_of_two": f"{_HERE}.pickers:PowerOfTwo",
        "best": f"{_HERE}.pickers:Best",
    },
    group="baton.placement_policies",
    error=lambda why: BadPolicy(f"scheduler.policy: {why}"),
)


def load(name: str, kind: type[Part]) -> type[Part]:
    """Return the class of that name, which must be a subclass of `kind`. Raises BadPolicy."""
    found = PARTS.load(name)
    if not issubclass(found, kind):
        other = next(one.__name__ for one in found.__mro__ if PolicyPart in one.__bases__)
        raise BadPolicy(f"scheduler.policy: {name!r} is no {kind.__name__}, but a {other}")
    return found
