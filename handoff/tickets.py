"""Tickets: to pull, release or renew saved KV, a caller shows the ticket from its manifest.

A ticket is an HMAC of request id and epoch under a key that a rank draws at its start and never reveals.
Clients choose request ids and logs contain them, so an id alone must not give access to KV. Computing a
ticket takes 2 us, once per save and once per call.
"""

from __future__ import annotations

import hmac
import secrets

import xxhash

from baton.handoff.errors import WrongTicket

BYTES = 16  # bytes per ticket


class Tickets:
    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, request_id: str, epoch: int) -> bytes:
        return hmac.digest(self._key, f"{epoch}/{request_id}".encode(), "sha256")[:BYTES]

    def fits(self, request_id: str, epoch: int, ticket: bytes) -> bool:
        """Return whether this is the attempt's ticket, compared in constant time."""
        return hmac.compare_digest(self.of(request_id, epoch), ticket)

    def number(self, request_id: str, epoch: int) -> int:
        return number(self.of(request_id, epoch), request_id, epoch)

    def check(self, request_id: str, epoch: int, ticket: bytes) -> None:
        """Raise WrongTicket if this is not the attempt's ticket."""
        if not self.fits(request_id, epoch, ticket):
            raise WrongTicket(
                f"KV of request {request_id!r}, epoch {epoch}: {'wrong' if ticket else 'no'} ticket; the"
                " manifest contains it"
            )


def number(ticket: bytes, request_id: str, epoch: int) -> int:
    """Return the 64-bit number, never 0, that marks slots in shared memory as this attempt's."""
    return int(xxhash.xxh3_64_intdigest(ticket + request_id.encode(), seed=epoch)) or 1
