"""Manifests: sealed by the source, checked by the puller before it pulls anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.handoff import digests, embeddings, forms
from baton.handoff.errors import CompatibilityMismatch, MalformedManifest, StaleEpoch, WrongRequest
from baton.handoff.forms import CacheLayer, Form, Share
from baton.handoff.groups import CacheGroup, described, num_records
from baton.protos.handoff_pb2 import EmbeddingManifest, Manifest

_PLANS = 64  # number of (form, turn) pairs cached


@dataclass(frozen=True)
class Puller:
    """One pulling rank, and what it can load."""

    worker_id: str
    rank: int
    compatibility_hash: str
    groups: tuple[CacheGroup, ...]
    layers: tuple[CacheLayer, ...]
    form: Form

    @functools.cached_property
    def shares(self) -> Callable[[Form, int], tuple[Share, ...]]:
        """The rank's shares of a save, by form and turn (`forms.shares`, cached)."""
        return functools.lru_cache(_PLANS)(functools.partial(forms.shares, self.layers, self.form, self.rank))


AnyManifest = TypeVar("AnyManifest", Manifest, EmbeddingManifest)


def seal(manifest: AnyManifest) -> AnyManifest:
    """Set the manifest's digest and return the manifest. Make no changes after this."""
    manifest.digest = _digest(manifest)
    return manifest


def is_of(manifest: Manifest, request_id: str, epoch: int) -> bool:
    """Return whether the manifest is intact and belongs to this attempt: only then release its shards."""
    named = manifest.request_id, manifest.epoch
    return named == (request_id, epoch) and manifest.digest == _digest(manifest)


def check(manifest: Manifest, request_id: str, epoch: int, puller: Puller) -> tuple[Share, ...]:
    """Check a manifest for this attempt, and return the rank's shares. Raises ManifestError."""
    source = _intact(manifest, f"request {request_id!r}")
    if manifest.request_id != request_id:
        raise WrongRequest(f"{source} is of request {manifest.request_id!r}; wanted here: {request_id!r}")
    if manifest.epoch != epoch:
        raise StaleEpoch(
            f"{source} is of epoch {manifest.epoch} of request {request_id!r}; wanted here: {epoch}"
        )
    _check_hash(manifest, source, puller.worker_id, puller.compatibility_hash)
    there = form_of(manifest)
    why = forms.unfit(puller.layers, puller.form, there)
    if why or there.shards != len(manifest.shards):
        why = why or f"its {len(manifest.shards)} shards do not divide {len(there.stages)} stages"
        raise MalformedManifest(f"{source} for request {request_id!r}: {why}")
    # spread requests over source ranks that have the same heads
    found = puller.shares(there, digests.seed(request_id, epoch) % there.ranks)
    _check_numbers(manifest, found, puller, source)
    return found


def check_embedding(
    manifest: EmbeddingManifest, identifier: str, rows: int, form: embeddings.Form, worker_id: str
) -> None:
    """Check the manifest of an image's embeddings; the prompt needs `rows` of them. Raises ManifestError."""
    source = _intact(manifest, f"image {identifier!r}")
    if manifest.identifier != identifier:
        raise WrongRequest(f"{source} is of image {manifest.identifier!r}; wanted here: {identifier!r}")
    _check_hash(manifest, source, worker_id, form.compatibility_hash)
    expected: dict[str, tuple[object, object]] = {
        "rows": (manifest.rows, rows),
        "width": (manifest.width, form.width),
        "dtype": (manifest.dtype, form.dtype),
        "rank": (manifest.shard.rank, 0),
        "slots": (manifest.shard.slots, 0),
        "record_bytes": (manifest.shard.record_bytes, embeddings.RECORD_BYTES),
        "num_records": (manifest.num_records, embeddings.records_for(rows * form.row_bytes)),
    }
    _compare(expected, f"{source} for image {identifier!r}")


def form_of(manifest: Manifest) -> Form:
    """Return the form of a save: shards of one pipeline stage have the same layers."""
    stages = tuple(dict.fromkeys(tuple(shard.layers) for shard in manifest.shards))
    ranks = len(manifest.shards) // max(1, len(stages))
    return Form(ranks, manifest.wire_dtype, stages if stages != ((),) else ())


def _check_numbers(manifest: Manifest, found: tuple[Share, ...], puller: Puller, source: str) -> None:
    groups = described(puller.groups, manifest.num_tokens)
    expected: dict[str, tuple[object, object]] = {
        "number of groups": (len(manifest.groups), len(groups)),
        "num_blocks": (manifest.num_blocks, num_records(puller.groups, manifest.num_tokens)),
    }
    for share in found:
        shard = manifest.shards[share.rank]
        expected[f"rank of shard {share.rank}"] = shard.rank, share.rank
        layers = share.form.layers_of(share.rank, 0)  # named on the wire only if there are stages
        expected[f"layers of shard {share.rank}"] = list(shard.layers), list(layers)
        expected[f"slots of shard {share.rank}"] = shard.slots, min(shard.slots, manifest.num_blocks)
        expected[f"record_bytes of shard {share.rank}"] = shard.record_bytes, share.record_bytes
    for number, (one, other) in enumerate(zip(manifest.groups, groups, strict=False)):
        for name in ("block_size", "first_block", "num_blocks"):
            expected[f"{name} of group {number}"] = getattr(one, name), getattr(other, name)
    _compare(expected, f"{source} for request {manifest.request_id!r}")


def _intact(manifest: AnyManifest, wanted: str) -> str:
    """Return the source's name for messages. Raises MalformedManifest for a mangled manifest."""
    source, came = f"the manifest of worker {manifest.worker_id!r}", _digest(manifest)
    if manifest.digest != came:
        raise MalformedManifest(
            f"{source}, wanted for {wanted}, has digest {came:016x}; it was sealed with"
            f" {manifest.digest:016x}"
        )
    return source


def _check_hash(manifest: AnyManifest, source: str, worker_id: str, here: str) -> None:
    if manifest.compatibility_hash != here:
        raise CompatibilityMismatch(
            f"{source} has compatibility hash {manifest.compatibility_hash}; worker {worker_id!r} has"
            f" {here}: `baton doctor --config FILE` shows the difference"
        )


def _compare(expected: Mapping[str, tuple[object, object]], what: str) -> None:
    for name, (there, here) in expected.items():
        if there != here:
            raise MalformedManifest(f"{what}: {name} is {there}; {here} is needed here")


def _digest(manifest: AnyManifest) -> int:
    rest = type(manifest)()
    rest.CopyFrom(manifest)
    rest.ClearField("digest")
    return digests.of_message(rest.SerializeToString(deterministic=True))
