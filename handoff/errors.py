"""Errors between a saved KV cache and a loaded one.

BatonError
└── HandoffError                 the KV cache could not be handed over; another worker can prefill again
    ├── InvalidWish              a request's kv_transfer_params cannot be parsed
    ├── UnsupportedCache         this engine's KV cache cannot be handed over at all
    ├── ManifestError            the manifest does not fit the request or this engine
    │   ├── WrongRequest         it describes another request's KV
    │   ├── StaleEpoch           it is of another attempt at the request
    │   ├── CompatibilityMismatch  it was written by an engine whose KV means something else
    │   ├── WrongTicket          its ticket is not of that save: whoever shows it was not given the KV
    │   └── MalformedManifest    its own numbers contradict each other
    ├── SourceError              the prefill worker no longer holds the KV
    │   ├── UnknownHandoff       it never did, or it was released
    │   ├── LeaseExpired         it did, for as long as the lease said
    │   ├── AlreadyTaken         another pull has taken its first records, whose slots were used again
    │   ├── SaveFailed           it could not bring it all from the accelerator
    │   ├── NothingSaved         the attempt there ended without a save, as it was to
    │   ├── NotCached            its prefix cache does not (or no longer) hold it
    │   └── SourceBusy           the prompt is still being computed, and too many pull such ones already
    ├── StagingFull              there is no room to keep KV until it is pulled
    ├── DigestMismatch           the bytes that arrived are not those that were saved
    └── TransportError           the bytes did not arrive
        ├── NoCommonTransport    the two ends offer none in common
        ├── TransportFailed      the connection or the memory broke
        ├── PullTimeout          not within the pull's deadline
        └── PullCancelled        the request was aborted meanwhile

Each text is one line that names both sides. `named` finds a class by the name that came over the wire: in a
frame (frames.py), or beside a gRPC call's status under ERROR_KEY.
"""

from __future__ import annotations

from baton.errors import BatonError

ERROR_KEY = "baton-error"  # trailing metadata: the name of the HandoffError


class HandoffError(BatonError):
    """The KV cache could not be handed over."""


class InvalidWish(HandoffError):
    """A request's `kv_transfer_params` cannot be parsed."""


class UnsupportedCache(HandoffError):
    """The engine's KV cache has a shape that cannot be copied block by block."""


class ManifestError(HandoffError):
    """The manifest does not fit."""


class WrongRequest(ManifestError):
    """The manifest describes another request's KV."""


class StaleEpoch(ManifestError):
    """The manifest is of another attempt at the request."""


class CompatibilityMismatch(ManifestError):
    """The KV was written by an engine whose cache means something else."""


class WrongTicket(ManifestError):
    """The ticket is missing, or of another save."""


class MalformedManifest(ManifestError):
    """The manifest's numbers contradict each other."""


class SourceError(HandoffError):
    """The source does not hold the KV."""


class UnknownHandoff(SourceError):
    """The source never saved the KV, or released it."""


class LeaseExpired(SourceError):
    """The KV was not pulled before its lease ended."""


class AlreadyTaken(SourceError):
    """Another pull has taken records whose slots were then reused."""


class SaveFailed(SourceError):
    """The source began to save the KV but could not finish."""


class NothingSaved(SourceError):
    """The attempt ended at the source without a save: with its first token, or aborted."""


class NotCached(SourceError):
    """The source's prefix cache lacks the wanted beginning of a prompt."""


class SourceBusy(SourceError):
    """Too many pulls already wait at the source for prompts still being computed."""


class StagingFull(HandoffError):
    """There is no room to keep the KV until it is pulled."""


class DigestMismatch(HandoffError):
    """The received bytes are not those that were saved."""


class TransportError(HandoffError):
    """The bytes did not arrive."""


class NoCommonTransport(TransportError):
    """The two ends have no transport in common."""


class TransportFailed(TransportError):
    """The connection or the memory failed."""


class PullTimeout(TransportError):
    """The bytes did not arrive within the deadline."""


class PullCancelled(TransportError):
    """The request was aborted meanwhile."""


def _leaves(cls: type[HandoffError]) -> dict[str, type[HandoffError]]:
    found = {cls.__name__: cls}
    for below in cls.__subclasses__():
        found.update(_leaves(below))
    return found


def named(name: str) -> type[HandoffError]:
    """Return the class of that name, or HandoffError if this version does not know it."""
    return _leaves(HandoffError).get(name, HandoffError)
