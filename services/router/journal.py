"""Bound the memory that running requests take in the router, in bytes.

A RequestState holds everything that another worker needs to resume a request: the prompt and its sampling
parameters, the tokens that the client has, the epoch. It lives only in this process: the clients of a router
that dies lose their connections, so nobody would be left to resume for.
"""

from __future__ import annotations

from baton.services.router.errors import NotAdmitted, Overloaded, Why
from baton.services.router.state import REQUEST_BYTES, ROOM_TOKENS, RequestState

DEFAULT_BYTES = 256 << 20
GROWTH = 2  # times the limit, for outputs that grow
_RETRY_AFTER_S = 1.0


class Journal:
    """The bytes reserved for waiting and running requests; they grow with the outputs.

    New requests enter below the limit. Outputs that grow may pass it, up to `GROWTH` times the limit; a
    request that would pass that too is ended early for lack of memory. For the event loop's thread only.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        """Create an empty journal; `limit` is in bytes."""
        self.limit = limit
        self._entries: dict[str, int] = {}  # request id -> bytes
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        return self._size

    def enter(self, state: RequestState) -> None:
        """Reserve room. Raises NotAdmitted: for now (503), or for good if it exceeds the limit (400)."""
        wanted = state.journal_bytes
        if wanted > self.limit:
            raise NotAdmitted(
                f"the request takes {wanted} bytes, more than the router's journal has for all requests "
                f"({self.limit}): shorten the prompt",
                Why.TOO_LARGE,
            )
        self.check_room(wanted)
        self.leave(state)
        self._entries[state.request_id] = wanted
        self._size += wanted

    def check_room(self, wanted: int = REQUEST_BYTES) -> None:
        """Check that `wanted` bytes are free, by default a request's minimum. Raises NotAdmitted (503)."""
        if self._size + wanted > self.limit:
            raise NotAdmitted(
                f"the router's journal is full, with {len(self._entries)} requests",
                Why.JOURNAL,
                _RETRY_AFTER_S,
            )

    def grow(self, state: RequestState) -> None:
        """Make room for a request's next output tokens. Raises Overloaded if there is none."""
        if state.request_id not in self._entries:
            return  # it is over
        state.room_tokens = len(state.tokens) + ROOM_TOKENS
        more = state.journal_bytes - self._entries[state.request_id]
        if self._size + more > GROWTH * self.limit:
            raise Overloaded(
                f"the router's journal has no room for {len(state.tokens)} output tokens besides "
                f"{len(self._entries) - 1} other requests",
                _RETRY_AFTER_S,
            )
        self._entries[state.request_id] += more
        self._size += more

    def leave(self, state: RequestState) -> None:
        """Free a request's room. Idempotent."""
        self._size -= self._entries.pop(state.request_id, 0)
