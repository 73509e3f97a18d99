"""Define every Redis key and every time to live.

All keys of a topic share the prefix `baton:{TOPIC}:`; the braces keep them in one slot of a Redis cluster, so
that one Lua script may change them together. Scripts get all keys, in the order of `NAMES`, and see them
under these names (`store/scripts/prelude.lua`).
"""

from __future__ import annotations

# name in the scripts -> (last part of the key, type and content); times are milliseconds of Redis' TIME
KEYS: dict[str, tuple[str, str]] = {
    "DRAINS": (
        "drains",
        "HASH name -> times that an operator drained it or undid that: odd while it is drained",
    ),
    "TURNS": ("turns", "HASH job of one scheduler at a time -> the time until which no other does it"),
    "TOLD": ("told", "HASH KIND:ID -> the last message of a router, fleet, process, or of turns"),
    "TOLD_LEASES": ("told:leases", "ZSET key of TOLD by the time at which it is forgotten"),
    "DECIDER": ("decider", "HASH who, fence, until: the scheduler that decides on numbers of workers"),
    "ORDERS": ("orders", "HASH fleet:ID -> what shall run in its places, serialized"),
}

NAMES: tuple[str, ...] = tuple(KEYS)

TOPIC_TTL_MS = 3_600_000  # ms; keys of an idle topic expire after this,
DRAINS_TTL_MS = 30 * 86_400_000  # ms; or after this: no worker repeats an operator's drain


def topic_keys(topic: str) -> list[str]:
    """Return the full keys of one topic, in the order of `NAMES`."""
    return [f"baton:{{{topic}}}:{suffix}" for suffix, _ in KEYS.values()]


def lua_header() -> str:
    """Return Lua declarations of the keys and constants above, put before each script."""
    lines = [f"local {name} = KEYS[{number}]" for number, name in enumerate(NAMES, start=1)]
    constants = {"TOPIC_TTL_MS": TOPIC_TTL_MS, "DRAINS_TTL_MS": DRAINS_TTL_MS}
    return "\n".join([*lines, *(f"local {name} = {value}" for name, value in constants.items())])
