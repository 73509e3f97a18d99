"""Facts about engines as text, so that an error can say how two engines differ."""

from __future__ import annotations

from collections.abc import Mapping

ABSENT = "none"


def unlike(
    there: tuple[str, Mapping[str, str]], here: tuple[str, Mapping[str, str]], sides: tuple[str, str]
) -> str:
    """Return why KV cannot pass from one engine to the other; empty if it can.

    there, here: compatibility hash and the facts that it covers. Properties in which engines may differ, such
    as their ranks, are not among these facts.
    """
    if there[0] == here[0]:
        return ""
    return differences(there[1], here[1], sides) or f"{there[0][:12]}, {here[0][:12]}"


def differences(there: Mapping[str, str], here: Mapping[str, str], sides: tuple[str, str]) -> str:
    """Return the differences, such as `speculative method: mtp there, none here`, joined by semicolons.

    `sides` names the two sides, as ("there", "here"). The result is "" if the facts of a side are unknown.
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
