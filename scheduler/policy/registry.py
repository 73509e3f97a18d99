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
        "placeable": f"{_HERE}.parts:Placeable",
        "same_revision": f"{_HERE}.parts:SameRevision",
        "has_adapter": f"{_HERE}.parts:HasAdapter",
        "not_excluded": f"{_HERE}.parts:NotExcluded",
        "fits": f"{_HERE}.parts:Fits",
        "room": f"{_HERE}.parts:HasRoom",
        # pair filters
        "compatible": f"{_HERE}.parts:Compatible",
        # scorers
        "queued_prompt_tokens": f"{_HERE}.parts:QueuedPromptTokens",
        "prefill_work": f"{_HERE}.parts:PrefillWork",
        "held_tokens": f"{_HERE}.parts:HeldTokens",
        "staging_room": f"{_HERE}.parts:StagingRoom",
        "running_requests": f"{_HERE}.parts:RunningRequests",
        "free_blocks": f"{_HERE}.parts:FreeBlocks",
        # pickers
        "power_of_four": f"{_HERE}.parts:PowerOfFour",
        "power_of_two": f"{_HERE}.parts:PowerOfTwo",
        "best": f"{_HERE}.parts:Best",
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
