"""Every Redis key and every time to live, in one place.

All keys of a topic share the prefix `baton:{TOPIC}:`; the braces keep them in one slot of a Redis cluster,
so that one Lua script may change them together. The scripts get all keys, in the order of `NAMES`, and see
them under these names (`store/scripts/prelude.lua`).
"""

from __future__ import annotations

from baton.attempts import EPOCH_KEEP_S

# name in the scripts -> (last part of the key, type and content); times are milliseconds of Redis' TIME
KEYS: dict[str, tuple[str, str]] = {
    "IDENTITIES": ("worker:identities", "HASH worker id -> WorkerIdentity, serialized"),
    "STATES": ("worker:states", "HASH worker id -> WorkerState, its number"),
    "LOADS": ("worker:loads", "HASH worker id -> WorkerLoad, serialized; absent before the first heartbeat"),
    "WORKER_LEASES": ("worker:leases", "ZSET worker id by the time at which it counts as dead"),
    "WORKER_NAMES": ("worker:names", "HASH worker id -> its name, the same each time it is started"),
    "DRAINS": (
        "drains",
        "HASH name -> times that an operator drained it or undid that: odd while it is drained",
    ),
    "WORKER_EPOCHS": ("worker:epochs", "HASH worker id -> epoch of its last message"),
    "WORKER_EPOCH_LEASES": (
        "worker:epoch:leases",
        "ZSET id of a worker that is gone, by the time at which its last epoch is forgotten",
    ),
    "ROSTER": ("worker:roster", "STRING changes with each registration: unequal means fetch identities anew"),
    "DEPLOYMENT": ("deployment", "HASH model, worker: what the first worker alive serves"),
    "TOKENS": ("reserved:tokens", "HASH worker id -> prompt tokens placed there and not yet prefilled"),
    "REQUESTS": ("reserved:requests", "HASH worker id -> requests placed there and not yet done there"),
    "BLOCKS": ("reserved:blocks", "HASH worker id -> KV blocks booked there"),
    "DECODING": ("reserved:decoding", "HASH worker id -> requests that decode there now"),
    "ATTEMPTS": ("attempts", "HASH request id -> live attempt, JSON"),
    "ATTEMPT_LEASES": ("attempt:leases", "ZSET request id by the time at which its reservation is gone"),
    "EPOCHS": ("epochs", "HASH request id -> last epoch placed, with a ! behind it when that one is over"),
    "EPOCH_LEASES": ("epoch:leases", "ZSET request id by the time at which its last epoch is forgotten"),
    "REVISION": ("revision", "STRING count of the changes of requests"),
    "CHANGES": ("changes", "ZSET request id by its last change's count; those of EPOCHS"),
    "WORKER_REVISION": ("worker:revision", "STRING count of the scripts that changed workers"),
    "WORKER_CHANGES": (
        "worker:changes",
        "ZSET worker id by WORKER_REVISION at the last change of it, or of what is booked there",
    ),
    "TURNS": ("turns", "HASH job of one scheduler at a time -> the time until which no other does it"),
    "TOLD": ("told", "HASH KIND:ID -> the last message of a router, fleet, process, or of turns"),
    "TOLD_LEASES": ("told:leases", "ZSET key of TOLD by the time at which it is forgotten"),
    "DECIDER": ("decider", "HASH who, fence, until: the scheduler that decides on numbers of workers"),
    "ORDERS": ("orders", "HASH fleet:ID -> what shall run in its places, serialized"),
    "GENERATION": ("generation", "STRING unequal to what it was: the server has lost what it held"),
    "HANDOFFS": ("handoffs", "LIST of finished attempts, newest first, JSON"),
}

NAMES: tuple[str, ...] = tuple(KEYS)

TOPIC_TTL_MS = 3_600_000  # ms; every key of a topic in which nothing happens any more vanishes after this,
DRAINS_TTL_MS = 30 * 86_400_000  # ms; or after this: an operator said it, and no worker says it again
HANDOFFS_KEPT = 64  # entries
SWEEP_LIMIT = 256  # attempts, workers and epochs that one script call removes at most, of each


def topic_keys(topic: str) -> list[str]:
    """Return the full keys of one topic, in the order of `NAMES`."""
    return [f"baton:{{{topic}}}:{suffix}" for suffix, _ in KEYS.values()]


def lua_header() -> str:
    """Return Lua declarations of the keys and constants above, put before each script."""
    lines = [f"local {name} = KEYS[{number}]" for number, name in enumerate(NAMES, start=1)]
    constants = {
        "TOPIC_TTL_MS": TOPIC_TTL_MS,
        "DRAINS_TTL_MS": DRAINS_TTL_MS,
        "EPOCH_KEEP_MS": 1_000 * EPOCH_KEEP_S,
        "HANDOFFS_KEPT": HANDOFFS_KEPT,
        "SWEEP_LIMIT": SWEEP_LIMIT,
    }
    return "\n".join([*lines, *(f"local {name} = {value}" for name, value in constants.items())])
