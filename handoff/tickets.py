"""Tickets: whoever pulls, releases or renews saved KV shows the ticket that came with its manifest.

A ticket is an HMAC of request and epoch under a key that a rank draws at its start and never reveals. So a
request's id, which clients choose and logs contain, opens nothing: only a process that was given the manifest
has the ticket. Making one takes 2 us; a rank makes one for each save and one for each call that shows one.
"""

from __future__ import annotations

import hmac
import secrets

import xxhash

from baton.handoff.errors import WrongTicket

BYTES = 16  # bytes per ticket


class Tickets:
    """Make and check the tickets of one rank's saves."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, request_id: str, epoch: int) -> bytes:
        """Return the ticket of attempt `epoch` at a request."""
        return hmac.digest(self._key, f"{epoch}/{request_id}".encode(), "sha256")[:BYTES]

    def fits(self, request_id: str, epoch: int, ticket: bytes) -> bool:
        """Return whether this is the attempt's ticket, in constant time."""
        return hmac.compare_digest(self.of(request_id, epoch), ticket)

    def number(self, request_id: str, epoch: int) -> int:
        """Return the number of the attempt's ticket."""
        return number(self.of(request_id, epoch), request_id, epoch)

    def check(self, request_id: str, epoch: int, ticket: bytes) -> None:
        """Raise WrongTicket for any ticket but the attempt's."""
        if not self.fits(request_id, epoch, ticket):
            raise WrongTicket(
                f"KV of request {request_id!r}, epoch {epoch}: {'a wrong' if ticket else 'no'} ticket; "
                "it is in the manifest"
            )


def number(ticket: bytes, request_id: str, epoch: int) -> int:
    """Return the number that marks slots in shared memory as this attempt's: 64 bits, never 0."""
    return int(xxhash.xxh3_64_intdigest(ticket + request_id.encode(), seed=epoch)) or 1
