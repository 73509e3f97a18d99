"""What the router keeps of every running request, so that any worker can go on with it; bounded in bytes.

A RequestState has it all: the prompt and how to sample from it (as they were sent first), the tokens that the
client has, the epoch. It lives in this process alone: a router that dies takes its clients' connections
along, so nobody would be left to go on for.
"""

from __future__ import annotations

from baton.services.router.errors import NotAdmitted, Overloaded, Why
from baton.services.router.state import REQUEST_BYTES, ROOM_TOKENS, RequestState

DEFAULT_BYTES = 256 << 20
GROWTH = 2  # times the limit, for answers that grow
_RETRY_AFTER_S = 1.0


class Journal:
    """Room for waiting and running requests: for what is there, and it grows with the answers.

    New requests come in below the limit. Answers that grow may pass it, up to `GROWTH` times the limit: only
    who would pass that ends in its middle for want of memory. The event loop's thread only.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        """`limit` is in bytes."""
        self.limit = limit
        self._entries: dict[str, int] = {}  # request id -> bytes
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes set aside."""
        return self._size

    def enter(self, state: RequestState) -> None:
        """Set room aside. Raises NotAdmitted: for now (503), or for good when it exceeds the whole (400)."""
        wanted = state.journal_bytes
        if wanted > self.limit:
            raise NotAdmitted(
                f"the request takes {wanted} bytes, more than the router keeps in all ({self.limit}): "
                "shorten the prompt; router.journal_mib sets the limit",
                Why.TOO_LARGE,
            )
        self.check_room(wanted)
        self.leave(state)
        self._entries[state.request_id] = wanted
        self._size += wanted

    def check_room(self, wanted: int = REQUEST_BYTES) -> None:
        """Raises NotAdmitted (503) while so many bytes are not free; by default the least of any request."""
        if self._size + wanted > self.limit:
            raise NotAdmitted(
                f"the router carries {len(self._entries)} requests already, and has no room to keep another "
                "(router.journal_mib)",
                Why.JOURNAL,
                _RETRY_AFTER_S,
            )

    def grow(self, state: RequestState) -> None:
        """Make room for the next tokens of an answer. Raises Overloaded when there is none."""
        if state.request_id not in self._entries:
            return  # it is over
        state.room_tokens = len(state.tokens) + ROOM_TOKENS
        more = state.journal_bytes - self._entries[state.request_id]
        if self._size + more > GROWTH * self.limit:
            raise Overloaded(
                f"the router has no room to keep {len(state.tokens)} tokens of an answer beside "
                f"{len(self._entries) - 1} other requests (router.journal_mib)",
                _RETRY_AFTER_S,
            )
        self._entries[state.request_id] += more
        self._size += more

    def leave(self, state: RequestState) -> None:
        """The request is over. Harmless when it is not here."""
        self._size -= self._entries.pop(state.request_id, 0)
