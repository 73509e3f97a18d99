"""What two engines are, in words: so that an error can say in what they differ."""

from __future__ import annotations

from collections.abc import Mapping

ABSENT = "none"


def differences(there: Mapping[str, str], here: Mapping[str, str], sides: tuple[str, str]) -> str:
    """`speculative method: mtp there, none here`, one part a difference; empty if nothing is known.

    `sides` names the two, as ("there", "here"). What one side does not tell is "none" to it.
    """
    if not there or not here:
        return ""
    keys = [*there, *(key for key in here if key not in there)]
    parts = [
        f"{key}: {there.get(key, ABSENT)} {sides[0]}, {here.get(key, ABSENT)} {sides[1]}"
        for key in sorted(keys)
        if there.get(key) != here.get(key)
    ]
    return "; ".join(parts)
