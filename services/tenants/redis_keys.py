"""The Redis keys of tenants. The braces keep a topic's keys in one slot of a cluster.

    baton:{TOPIC}:tenants:book           HASH   version -> changes with each edit, book -> JSON; no expiry
    baton:{TOPIC}:tenants:slots:OWNER    HASH   router id -> "COUNT UNTIL NUMBER": its running requests,
                                                when that count expires (ms of the server's time),
                                                and the message's number
    baton:{TOPIC}:tenants:slots:probe    STRING empty; a router writes it to check that this is the master
    baton:{TOPIC}:tenants:rate:...OWNER  STRING of throttled-py; expires when the bucket would be full

OWNER is `tenant:NAME` or `key:NAME`; for rates it follows the limit's name.
"""

from __future__ import annotations

SLOT_LEASE_S = 10.0  # after this long without a message a router counts as having no requests
RENEW_S = 3.0
PROBE_KEEP_MS = 10_000


def prefix(topic: str) -> str:
    return f"baton:{{{topic}}}:tenants"


def book(topic: str) -> str:
    return f"{prefix(topic)}:book"


def slots(topic: str, owner: str) -> str:
    return f"{prefix(topic)}:slots:{owner}"


def probe(topic: str) -> str:
    """Return the key that routers write to test for the master. The ACL rule for slots covers it."""
    return slots(topic, "probe")


def rate_prefix(topic: str) -> str:
    """Return the prefix that throttled-py puts before the names of rates."""
    return f"{prefix(topic)}:rate"
