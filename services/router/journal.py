"""Bound the memory that requests take in the router, in bytes.

A RequestState holds what another worker needs to resume a request: prompt, sampling parameters, output tokens
and epoch. It is kept only in this process: when a router dies, its clients lose their connections anyway.
"""

from __future__ import annotations

from baton.services.router.errors import NotAdmitted, Overloaded, Why
from baton.services.router.state import REQUEST_BYTES, ROOM_TOKENS, RequestState

DEFAULT_BYTES = 256 << 20
GROWTH = 2  # running requests may grow to this many times the limit
_RETRY_AFTER_S = 1.0


class Journal:
    """The bytes reserved for waiting and running requests; a reservation grows with its request's output.

    New requests are admitted up to the limit. Running ones may grow to `GROWTH` times the limit; a request
    that would exceed that is ended with an error. Not thread-safe.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        """limit: bytes."""
        self.limit = limit
        self._entries: dict[str, int] = {}  # request id -> bytes
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        return self._size

    def enter(self, state: RequestState) -> None:
        """Reserve a request's memory. Raises NotAdmitted: 503, or 400 if it exceeds the whole limit."""
        wanted = state.journal_bytes
        if wanted > self.limit:
            raise NotAdmitted(
                f"the request takes {wanted} bytes, more than the router keeps for all ({self.limit}): "
                "shorten the prompt; router.journal_mib sets the limit",
                Why.TOO_LARGE,
            )
        self.check_room(wanted)
        self.leave(state)
        self._entries[state.request_id] = wanted
        self._size += wanted

    def check_room(self, wanted: int = REQUEST_BYTES) -> None:
        """Check that `wanted` bytes, by default a request's minimum, are free. Raises NotAdmitted (503)."""
        if self._size + wanted > self.limit:
            raise NotAdmitted(
                f"the router has {len(self._entries)} requests already, and no memory for another "
                "(router.journal_mib)",
                Why.JOURNAL,
                _RETRY_AFTER_S,
            )

    def grow(self, state: RequestState) -> None:
        """Reserve memory for a request's next output tokens. Raises Overloaded if there is none."""
        if state.request_id not in self._entries:
            return  # the request has ended
        state.room_tokens = len(state.tokens) + ROOM_TOKENS
        more = state.journal_bytes - self._entries[state.request_id]
        if self._size + more > GROWTH * self.limit:
            raise Overloaded(
                f"the router has no memory for {len(state.tokens)} output tokens beside "
                f"{len(self._entries) - 1} other requests (router.journal_mib)",
                _RETRY_AFTER_S,
            )
        self._entries[state.request_id] += more
        self._size += more

    def leave(self, state: RequestState) -> None:
        """Release a request's memory. Idempotent."""
        self._size -= self._entries.pop(state.request_id, 0)
