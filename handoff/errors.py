"""Errors of handoffs.

Each text is one line that names both sides. Errors cross the wire by name, in a frame (frames.py) or in a
gRPC call's trailing metadata under ERROR_KEY; `named` returns the class.
"""

from __future__ import annotations

from baton.errors import BatonError

ERROR_KEY = "baton-error"  # trailing metadata: the name of the HandoffError


class HandoffError(BatonError):
    """The KV could not be handed over. Another worker can prefill the prompt again."""


class UnsupportedCache(HandoffError):
    """The engine's KV cache cannot be copied block by block."""


class ManifestError(HandoffError):
    """The manifest does not fit the request or this engine."""


class WrongRequest(ManifestError):
    """The manifest describes another request's KV."""


class StaleEpoch(ManifestError):
    """The manifest belongs to another attempt at the request."""


class CompatibilityMismatch(ManifestError):
    """The KV comes from an incompatible engine (compatibility.py)."""


class WrongTicket(ManifestError):
    """The ticket is missing or belongs to another save: the caller was not given this KV."""


class MalformedManifest(ManifestError):
    """The manifest's numbers contradict each other."""


class SourceError(HandoffError):
    """The source does not hold the KV."""


class UnknownHandoff(SourceError):
    """The source never saved the KV, or it was released."""


class LeaseExpired(SourceError):
    """The KV was not pulled before its lease expired."""


class AlreadyTaken(SourceError):
    """Another pull took records of this save, and their slots were reused."""


class SaveFailed(SourceError):
    """The source could not copy all of the KV."""


class NothingSaved(SourceError):
    """The attempt at the source ended without a save: its answer was one token, or it was aborted."""


class NotCached(SourceError):
    """The source's prefix cache lacks the requested prefix of the prompt."""


class SourceBusy(SourceError):
    """The source already has the maximum number of pulls from prompts still being computed."""


class SourceTimeout(SourceError):
    """The source did not save the KV in time."""


class StagingFull(HandoffError):
    """Staging has no room for the KV."""


class DigestMismatch(HandoffError):
    """The received bytes differ from the saved ones."""


class TransportError(HandoffError):
    """The bytes did not arrive."""


class NoCommonTransport(TransportError):
    """The two ends have no transport in common."""


class TransportFailed(TransportError):
    """The connection or the memory failed."""


class PullTimeout(TransportError):
    """The bytes did not arrive before the pull's deadline."""


class PullCancelled(TransportError):
    """The request was aborted during the pull."""


def _leaves(cls: type[HandoffError]) -> dict[str, type[HandoffError]]:
    found = {cls.__name__: cls}
    for below in cls.__subclasses__():
        found.update(_leaves(below))
    return found


def named(name: str) -> type[HandoffError]:
    """Return the class of that name; HandoffError if this version has none."""
    return _leaves(HandoffError).get(name, HandoffError)
