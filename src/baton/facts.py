"""Facts about engines, in words, so that an error can say in what two of them differ."""

from __future__ import annotations

from collections.abc import Mapping

ABSENT = "none"


def unlike(
    there: tuple[str, Mapping[str, str]], here: tuple[str, Mapping[str, str]], sides: tuple[str, str]
) -> str:
    """Return why KV cannot pass from one engine to another; empty if it can.

    there, here: their compatibility hashes, and these hashes' ingredients in words. Properties in which
    engines may differ, such as their ranks, are in neither.
    """
    if there[0] == here[0]:
        return ""
    return differences(there[1], here[1], sides) or f"{there[0][:12]}, {here[0][:12]}"


def differences(there: Mapping[str, str], here: Mapping[str, str], sides: tuple[str, str]) -> str:
    """Return the differences, such as `speculative method: mtp there, none here`, joined by semicolons.

    `sides` names the two sides, as ("there", "here"). A fact missing on one side is "none" there. The result
    is "" if either side states no facts at all.
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
