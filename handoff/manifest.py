"""Manifests: sealed by the saving side, and checked by the pulling side before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.handoff import digests
from baton.handoff.errors import CompatibilityMismatch, MalformedManifest, StaleEpoch, WrongRequest
from baton.handoff.groups import CacheGroup, described, num_records
from baton.protos.handoff_pb2 import Manifest, Shard


@dataclass(frozen=True)
class Puller:
    """One pulling rank, and the form of its KV."""

    worker_id: str
    rank: int
    compatibility_hash: str
    groups: tuple[CacheGroup, ...]
    record_bytes: int  # of one block


def seal(manifest: Manifest) -> Manifest:
    """Write a digest of all the rest into the manifest, as the last change. Returns it."""
    manifest.digest = _digest(manifest)
    return manifest


def read(serialized: bytes) -> Manifest:
    """Parse a manifest. Raises MalformedManifest."""
    try:
        return Manifest.FromString(serialized)
    except DecodeError as error:
        raise MalformedManifest(f"{len(serialized)} bytes that are no manifest: {error}") from None


def is_of(manifest: Manifest, request_id: str, epoch: int) -> bool:
    """Return whether the manifest is whole and of this attempt. Only then may its shards even be released."""
    named = manifest.request_id, manifest.epoch
    return named == (request_id, epoch) and manifest.digest == _digest(manifest)


def check(manifest: Manifest, request_id: str, epoch: int, puller: Puller) -> Shard:
    """Return the shard that this rank has to pull for attempt `epoch` at `request_id`.

    Raises WrongRequest, StaleEpoch, CompatibilityMismatch, MalformedManifest.
    """
    source = f"the manifest of worker {manifest.worker_id!r}"
    came = _digest(manifest)
    if manifest.digest != came:
        raise MalformedManifest(
            f"{source}, wanted for request {request_id!r}, has digest {came:016x}; it was sealed with"
            f" {manifest.digest:016x}"
        )
    if manifest.request_id != request_id:
        raise WrongRequest(f"{source} is of request {manifest.request_id!r}; wanted here: {request_id!r}")
    if manifest.epoch != epoch:
        raise StaleEpoch(
            f"{source} is of epoch {manifest.epoch} of request {request_id!r}; wanted here: {epoch}"
        )
    if manifest.compatibility_hash != puller.compatibility_hash:
        raise CompatibilityMismatch(
            f"{source} has compatibility hash {manifest.compatibility_hash}; worker {puller.worker_id!r} has"
            f" {puller.compatibility_hash}: `baton doctor --config FILE` tells in what they differ"
        )
    if puller.rank >= len(manifest.shards):
        raise MalformedManifest(
            f"{source} has {len(manifest.shards)} shards; rank {puller.rank} finds none of its own"
        )
    shard = manifest.shards[puller.rank]
    _check_numbers(manifest, shard, puller, source)
    return shard


def _check_numbers(manifest: Manifest, shard: Shard, puller: Puller, source: str) -> None:
    groups = described(puller.groups, manifest.num_tokens)
    expected: dict[str, tuple[object, object]] = {
        "rank of the shard": (shard.rank, puller.rank),
        "number of slots": (shard.slots, min(shard.slots, manifest.num_blocks)),
        "number of groups": (len(manifest.groups), len(groups)),
        "num_blocks": (manifest.num_blocks, num_records(puller.groups, manifest.num_tokens)),
        "record_bytes": (shard.record_bytes, puller.record_bytes),
    }
    for number, (one, other) in enumerate(zip(manifest.groups, groups, strict=False)):
        for name in ("block_size", "first_block", "num_blocks"):
            expected[f"{name} of group {number}"] = getattr(one, name), getattr(other, name)
    for name, (there, here) in expected.items():
        if there != here:
            raise MalformedManifest(
                f"{source} for request {manifest.request_id!r}: {name} is {there}; {here} is needed here"
            )


def _digest(manifest: Manifest) -> int:
    rest = Manifest()
    rest.CopyFrom(manifest)
    rest.ClearField("digest")
    return digests.of_message(rest.SerializeToString(deterministic=True))
