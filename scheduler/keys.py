"""All of the scheduler's Redis keys and their times to live.

The keys of a topic begin with `baton:{TOPIC}:`. The braces keep them in one slot of a Redis Cluster, so one
Lua script can change them together. Scripts get all keys in the order of `NAMES`, as variables of these
names.
"""

from __future__ import annotations

# name in the scripts -> (last part of the key, type and content); times are Redis' TIME in milliseconds
KEYS: dict[str, tuple[str, str]] = {
    "DRAINS": (
        "drains",
        "HASH name -> how often an operator drained or undrained it: odd while it is drained",
    ),
    "TOLD": ("told", "HASH KIND:ID -> the last message of a router, fleet, process, or of turns"),
    "TOLD_LEASES": ("told:leases", "ZSET field of TOLD -> when it expires"),
    "DECIDER": ("decider", "HASH who, fence, until: the scheduler that autoscales; tended: the last check"),
    "ORDERS": ("orders", "HASH fleet:ID -> what should run in its places, serialized"),
}

NAMES: tuple[str, ...] = tuple(KEYS)

TOPIC_TTL_MS = 3_600_000  # lifetime of an idle topic's keys, except its drains
DRAINS_TTL_MS = 30 * 86_400_000  # longer, because only an operator could repeat them


def topic_keys(topic: str) -> list[str]:
    """Return the keys of a topic in the order of `NAMES`."""
    return [f"baton:{{{topic}}}:{suffix}" for suffix, _ in KEYS.values()]


def lua_header() -> str:
    """Return Lua declarations of the keys and constants, to put before each script."""
    lines = [f"local {name} = KEYS[{number}]" for number, name in enumerate(NAMES, start=1)]
    constants = {"TOPIC_TTL_MS": TOPIC_TTL_MS, "DRAINS_TTL_MS": DRAINS_TTL_MS}
    return "\n".join([*lines, *(f"local {name} = {value}" for name, value in constants.items())])
