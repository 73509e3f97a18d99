"""Makers of mutants: each takes a correct handoff and returns a wrong one.

A maker spoils the manifest's bytes or its fields (sealed again, as a faulty writer would), uses another
save's manifest, or spoils the bytes in shared memory or the chunks in transit.
"""

import contextlib
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
from google.protobuf.message import DecodeError

from baton.handoff import digests
from baton.handoff.errors import MalformedManifest
from baton.handoff.manifest import seal
from baton.handoff.transports.nixl import offer_of as nixl_offer_of
from baton.handoff.transports.shm import offer_of
from baton.protos.handoff_pb2 import Manifest, NixlOffer, Run, SharedMemoryOffer
from tests.handoff.caches import Source
from tests.handoff.server import Chunk, FalseSource

PULL_S = 2.0
SHORT_S = 0.05  # timeout of a pull that waits in vain


@dataclass
class Stage:
    """The inputs of makers. `right` may be changed, other saves may not."""

    source: Source
    others: Manifest  # manifest of another request, at the same source
    theirs: Manifest  # manifest of a request at another worker
    transport: str
    false_source: FalseSource
    right: Manifest = field(default_factory=Manifest)


@dataclass
class Mutant:
    kind: str
    manifest: bytes
    counts: bool = True  # what it would load differs from the correct handoff
    untouched: bool = True  # refused before anything is loaded: the cache must not change
    during: Callable[[], AbstractContextManager[object]] = nullcontext
    timeout_s: float = PULL_S


def makers(transport):
    """Return all makers for a transport, those with more variants several times."""
    common = [manifest_bytes, manifest_fields, manifest_fields, swapped, memory, memory]
    return [*common, stream, stream, stream] if transport == "tcp" else common


def spoil_bytes(rng, good, other):
    """Flip, cut, insert, double or splice bytes; never return them unchanged."""
    while True:
        at, until = sorted((rng.randrange(len(good)), rng.randrange(1, len(good) + 1)))
        way = rng.randrange(6)
        if way == 0:
            spoiled = bytearray(good)
            for _ in range(rng.choice((1, 1, 2, 8))):
                spoiled[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            made = bytes(spoiled)
        else:
            made = [
                good[:at],
                good[:at] + rng.randbytes(rng.randrange(1, 40)) + good[at:],
                good[:at] + good[until:],
                good[:until] + good[at:],
                good[:at] + other[at:],
            ][way - 1]
        if made != good:
            return made


def meaning(manifest, transport):
    """Return the fields that decide what is loaded, and from where."""
    shard = manifest.shards[0] if manifest.shards else None
    place = ()
    if shard is not None:
        offer = shard.offers.get(transport)
        place = (shard.rank, shard.record_bytes, offer, shard.address if transport == "tcp" else "")
    groups = tuple(group.SerializeToString() for group in manifest.groups)
    numbers = (manifest.num_tokens, manifest.num_blocks)
    whose = (manifest.request_id, manifest.epoch, manifest.compatibility_hash, manifest.digest)
    return (*whose, *numbers, groups, place)


def manifest_bytes(rng, stage):
    good = stage.right.SerializeToString()
    made = spoil_bytes(rng, good, stage.others.SerializeToString())
    try:
        counts = meaning(Manifest.FromString(made), stage.transport) != meaning(stage.right, stage.transport)
    except DecodeError:
        counts = True
    return Mutant("manifest's bytes", made, counts, untouched=counts)  # a repeated field changes nothing


_HUGE = (2**31, 2**32 - 1)
_HUGER = (2**32, 2**63 - 1, 2**63, 2**64 - 1)
_FIELDS = [
    lambda r, m, _s: setattr(m, "request_id", r.choice(("", "other", m.request_id + "0", "\x00" * 50))),
    lambda r, m, _s: setattr(m, "epoch", r.choice((0, 1, 3, *_HUGER))),
    lambda r, m, _s: setattr(m, "compatibility_hash", r.choice(("", "0" * 32, m.compatibility_hash[:-1]))),
    lambda r, m, _s: setattr(m, "num_tokens", r.choice((0, 1, 32, m.num_tokens + 32, *_HUGE))),
    lambda r, m, _s: setattr(r.choice(m.groups), "block_size", r.choice((0, 1, 16, 64, *_HUGE))),
    lambda r, m, _s: setattr(r.choice(m.groups), "first_block", r.choice((1, 2, 7, *_HUGE))),
    lambda r, m, _s: setattr(r.choice(m.groups), "num_blocks", r.choice((0, 1, 7, *_HUGE))),
    lambda r, m, _s: m.groups.extend([m.groups[0]] * r.choice((1, 500))),
    lambda r, m, _s: m.groups.pop(r.randrange(len(m.groups))),
    lambda r, m, _s: setattr(m, "num_blocks", r.choice((0, 1, m.num_blocks + 1, *_HUGE))),
    lambda _r, m, _s: m.ClearField("shards"),
    lambda r, m, _s: setattr(m.shards[0], "rank", r.choice((1, *_HUGE))),
    lambda r, m, _s: setattr(m.shards[0], "record_bytes", r.choice((0, 8, *_HUGER))),
    lambda r, m, _s: m.shards[0].layers.extend((*range(r.randint(0, 3)), r.choice((0, *_HUGE)))),
    lambda _r, m, s: m.shards.insert(0, s.theirs.shards[0]),
]
_PLACES = {
    "shm": [
        lambda r, m, s: _place(m, s, segment=r.choice(("", "../../etc/passwd", "baton-kv-1-0", "\x00"))),
        lambda _r, m, s: _place(m, s, segment=offer_of(s.theirs.shards[0]).segment),
        lambda _r, m, s: _place(m, s, host="another machine"),
    ],
    "nixl": [
        lambda r, m, s: _place(m, s, address=r.choice((0, 1, 2**63, 2**64 - 1))),
        lambda r, m, s: _place(m, s, address=_offer(m, s).address + r.choice((-4096, -8, 8, 4096, 2**26))),
        lambda _r, m, s: _place(m, s, address=nixl_offer_of(s.theirs.shards[0]).address),
        lambda r, m, s: _place(m, s, agent=r.choice(("", "nobody", nixl_offer_of(s.theirs.shards[0]).agent))),
        lambda _r, m, s: m.shards[0].offers.update(nixl=s.theirs.shards[0].offers["nixl"]),
        lambda r, m, s: _put_metadata(m, s, r.choice((b"", b"\xff", r.randbytes(300)))),
        lambda r, m, s: _put_metadata(m, s, _metadata(s.right)[: r.randrange(1, 300)]),
    ],
    "tcp": [
        lambda r, m, _s: setattr(
            m.shards[0], "address", r.choice(("", "127.0.0.1:1", "[::", "127.0.0.1:99999"))
        ),
        lambda _r, m, s: setattr(m.shards[0], "address", s.theirs.shards[0].address),
        lambda _r, m, _s: m.shards[0].offers.pop("tcp", None),
    ],
}


_SLOTS = [
    lambda r, m, s: _place(m, s, offset=r.choice((0, 1, 8, 63, 64, 128, *_HUGE, *_HUGER))),
    lambda r, m, s: _place(m, s, offset=_offer(m, s).offset + r.choice((-4096, -64, -8, -1, 1, 8, 64, 4096))),
    lambda _r, m, s: _put_runs(m, s, _runs(s.others, s)),
    lambda r, m, s: _put_runs(m, s, [r.choice(_runs(m, s) + _runs(s.others, s)), *_runs(m, s)[1:], (0, 1)]),
    lambda r, m, s: _put_runs(m, s, r.choice(([], [(0, 0)], [*_runs(m, s), (0, 0)], _runs(m, s) * 2))),
    lambda r, m, s: _put_runs(m, s, [(r.choice((0, 1, 99, *_HUGE)), r.choice((1, 6, *_HUGE)))]),
    lambda r, m, s: _put_runs(m, s, [(one, 1) for one in _shuffled(r, m, s)]),
    lambda _r, m, s: m.shards[0].offers.pop(s.transport, None),
    lambda r, m, s: m.shards[0].offers.update({s.transport: r.choice((b"", b"\xff", r.randbytes(20)))}),
]
_PLACES["shm"] += _SLOTS
_PLACES["nixl"] += _SLOTS


def _offer(manifest, stage):
    """Return the transport's offer, or an empty one if it cannot be parsed."""
    parse, empty = (nixl_offer_of, NixlOffer) if stage.transport == "nixl" else (offer_of, SharedMemoryOffer)
    try:
        return parse(manifest.shards[0])
    except MalformedManifest:
        return empty()


def _place(manifest, stage, **changes):
    offer = _offer(manifest, stage)
    for name, value in changes.items():
        setattr(offer, name, value)
    manifest.shards[0].offers[stage.transport] = offer.SerializeToString()


def _metadata(manifest):
    return nixl_offer_of(manifest.shards[0]).regions[0].metadata


def _put_metadata(manifest, stage, metadata):
    """Offer metadata of an unknown agent, because that of a known one is not loaded again."""
    offer = NixlOffer.FromString(stage.right.shards[0].offers["nixl"])
    offer.agent, offer.regions[0].metadata = "nobody", metadata
    manifest.shards[0].offers["nixl"] = offer.SerializeToString()


def _runs(manifest, stage):
    return [(run.first, run.count) for run in _offer(manifest, stage).runs]


def _put_runs(manifest, stage, runs):
    offer = _offer(manifest, stage)
    del offer.runs[:]
    offer.runs.extend(Run(first=first, count=count) for first, count in runs)
    manifest.shards[0].offers[stage.transport] = offer.SerializeToString()


def _shuffled(rng, manifest, stage):
    slots = [slot for first, count in _runs(manifest, stage) for slot in range(first, first + count)]
    while (mixed := rng.sample(slots, len(slots))) == slots:
        pass
    return mixed


def manifest_fields(rng, stage):
    """Change fields before or after the manifest is sealed."""
    manifest = deepcopy(stage.right)
    while meaning(manifest, stage.transport) == meaning(stage.right, stage.transport):
        # the first of two shards belongs to another worker, with the same rank
        rng.choice([*_FIELDS, *_PLACES[stage.transport] * 2])(rng, manifest, stage)
    if rng.random() < 0.8:
        # if slots are shuffled, the first blocks may be right
        untouched = not manifest.shards or _runs(manifest, stage) == _runs(stage.right, stage)
        return Mutant(
            "manifest's fields, sealed again", seal(manifest).SerializeToString(), untouched=untouched
        )
    return Mutant("manifest's fields", manifest.SerializeToString())


def swapped(rng, stage):
    """Use a correct manifest of another save, as it is or under this request's name."""
    whose = rng.randrange(6)
    manifest, kind = deepcopy(stage.right), "swapped: "
    if whose == 0:
        manifest, kind = stage.others, kind + "another request's"
    elif whose == 1:
        manifest, kind = stage.theirs, kind + "another worker's"
    elif whose == 2:
        manifest.epoch, kind = 1, kind + "an older epoch's"
        seal(manifest)
    elif whose == 3:
        manifest = deepcopy(rng.choice((stage.others, stage.theirs)))
        manifest.request_id, manifest.epoch = stage.right.request_id, stage.right.epoch
        seal(manifest)
        kind += "another's under this request's name"
    elif whose == 4:
        manifest.compatibility_hash = f"{rng.getrandbits(128):032x}"
        seal(manifest)
        kind += "of another model, drafter or method"
    else:
        stage.source.staging.release(stage.right.request_id, stage.right.epoch)
        kind += "replayed after its release"
    # over TCP, the place in the offer does not matter
    same_place = whose == 3 and stage.transport == "tcp" and manifest.shards == stage.others.shards
    return Mutant(kind, manifest.SerializeToString(), counts=not same_place, untouched=not same_place)


def memory(rng, stage):
    """Change bytes in shared memory, which all transports read."""
    ways = [
        ("memory: a record's bit", _flip_record),
        ("memory: a digest", _flip_digest),
        ("memory: two records, digests too", _swap_records),
        ("memory: another request's records, digests too", _others_records),
        ("memory: zeros", _zeros),
        ("memory: said to have failed", lambda _r, entry, _s: (entry.view.expect(), entry.view.fail())),
        ("memory: said not to be whole", lambda _r, entry, _s: entry.view.expect()),
    ]
    if stage.transport != "tcp":
        ways.append(("memory: another's ticket", _ticket))
    kind, spoil = rng.choice(ways)

    @contextlib.contextmanager
    def during():
        with stage.source.staging.opened(stage.right.request_id, stage.right.epoch) as entry:
            spoil(rng, entry, stage)
            yield

    timeout_s = SHORT_S if "not to be whole" in kind else PULL_S
    return Mutant(kind, stage.right.SerializeToString(), untouched=False, during=during, timeout_s=timeout_s)


def _records(entry):
    """Return all records, which are in one piece, because staging has room."""
    return entry.view.records(0, entry.num_blocks)


def _flip_record(rng, entry, stage):
    records = _records(entry).reshape(-1)
    records[rng.randrange(records.size)] ^= 1 << rng.randrange(8)


def _flip_digest(rng, entry, stage):
    at = rng.randrange(entry.num_blocks)
    entry.view.arrived(at, entry.view.digests(at, at + 1) ^ np.uint64(1 << rng.randrange(64)))


def _swap_records(rng, entry, stage):
    pair = rng.sample(range(entry.num_blocks), 2)
    records = _records(entry)
    records[pair] = records[pair[::-1]]
    found = entry.view.digests(0, entry.num_blocks)
    found[pair] = found[pair[::-1]]
    entry.view.arrived(0, found)


def _others_records(rng, entry, stage):
    first = rng.randrange(entry.num_blocks)
    with stage.source.staging.opened(stage.others.request_id, stage.others.epoch) as other:
        _records(entry)[first:] = _records(other)[first:]
        entry.view.arrived(first, other.view.digests(first, entry.num_blocks))


def _zeros(rng, entry, stage):
    at = rng.randrange(entry.num_blocks)
    _records(entry)[at] = 0
    if rng.random() < 0.5:
        entry.view.arrived(at, np.zeros(1, np.uint64))


def _ticket(rng, entry, stage):
    older = stage.source.staging.tickets.number(stage.right.request_id, stage.right.epoch - 1)
    entry.view.sign(rng.choice((0, older, rng.getrandbits(64))))


def stream(rng, stage):
    """Spoil the stream of chunks: their order, places, sizes, digests or bytes."""
    with stage.source.staging.opened(stage.right.request_id, stage.right.epoch) as entry:
        right = _chunks(entry)
    kind, good = "", [chunk.encode() for chunk in right]
    messages = good
    while _same(messages, good):
        kind, spoil = rng.choice(_STREAMS)
        chunks = list(right)
        spoil(rng, chunks, stage)
        messages = [_encoded(chunk) for chunk in chunks]
    stage.false_source.messages = messages
    manifest = deepcopy(stage.right)
    manifest.shards[0].address = stage.false_source.address
    return Mutant(f"stream: {kind}", seal(manifest).SerializeToString(), untouched=False)


def _chunks(entry):
    return [
        Chunk(at, _records(entry)[at : at + 2].reshape(-1).copy(), entry.view.digests(at, at + 2))
        for at in range(0, entry.num_blocks, 2)
    ]


def _encoded(chunk):
    return chunk if isinstance(chunk, bytes) else chunk.encode()


def _same(messages, good):
    """Return whether the right chunks come first, because nothing after them is read."""
    return b"".join(messages).startswith(b"".join(good))


def _spoiled(rng, chunks, stage):
    messages = [_encoded(chunk) for chunk in chunks]
    at = rng.randrange(len(chunks))
    chunks[at] = spoil_bytes(rng, messages[at], messages[at - 1])


def _order(rng, chunks, stage):
    """Omit, double, swap or append a chunk."""
    at = rng.randrange(len(chunks))
    way = rng.randrange(4)
    if way == 0:
        del chunks[at]
    elif way == 1:
        chunks.insert(at, chunks[at])
    elif way == 2:
        chunks[at], chunks[at - 1] = chunks[at - 1], chunks[at]
    else:
        chunks.append(replace(chunks[at], first_block=6))


def _places(rng, chunks, stage):
    """Swap the places of two correct chunks."""
    one, two = rng.sample(range(len(chunks)), 2)
    chunks[one], chunks[two] = chunks[two], chunks[one]
    chunks[:] = [replace(chunk, first_block=2 * at) for at, chunk in enumerate(chunks)]


def _first_block(rng, chunks, stage):
    at = rng.randrange(len(chunks))
    chunks[at] = replace(chunks[at], first_block=rng.choice((0, 1, 2, 5, 6, *_HUGE)))


def _digests(rng, chunks, stage):
    at = rng.randrange(len(chunks))
    own = chunks[at].digests
    made = rng.choice(
        (own[:0], own[:1], own[::-1], np.append(own, own), own + np.uint64(1), own * np.uint64(0))
    )
    chunks[at] = replace(chunks[at], digests=made)


def _sizes(rng, chunks, stage):
    at = rng.randrange(len(chunks))
    own = chunks[at].records
    made = rng.choice((own[:0], own[:1], own[:-1], own[: own.size // 2], np.append(own, own), own[:-8]))
    chunks[at] = replace(chunks[at], records=made)


def _others(rng, chunks, stage):
    at = rng.randrange(len(chunks))
    with stage.source.staging.opened(stage.others.request_id, stage.others.epoch) as entry:
        chunks[at] = _chunks(entry)[at]


def _older(rng, chunks, stage):
    """Send a chunk with the digests of an older attempt."""
    right = stage.right
    change = digests.seed(right.request_id, right.epoch - 1) - digests.seed(right.request_id, right.epoch)
    at = rng.randrange(len(chunks))
    chunks[at] = replace(chunks[at], digests=chunks[at].digests + np.uint64(change % 2**64))


def _garbage(rng, chunks, stage):
    chunks[:] = [rng.randbytes(rng.choice((1, 3, 50, 4096))) for _ in range(rng.randrange(1, 4))]


def _lengths(rng, chunks, stage):
    """Announce wrong lengths, up to more than any memory."""
    huge = rng.choice((1, 100, 2**16, *_HUGE))
    kind = rng.choice((b"RECS", b"FAIL", b"WAIT", b"SHUT"))
    numbers = rng.choice(((huge, 0, 2), (16, 0, huge), (8, 0, huge), (huge, huge, huge)))
    chunks[:] = [struct.pack("<4sIII", kind, *numbers) + rng.randbytes(rng.choice((0, 5)))]


_STREAMS = [
    ("a chunk's bytes", _spoiled),
    ("order and number", _order),
    ("another place's chunk, digests too", _places),
    ("first block", _first_block),
    ("digests", _digests),
    ("sizes", _sizes),
    ("another request's chunk", _others),
    ("an older epoch's chunk", _older),
    ("garbage", _garbage),
    ("lengths", _lengths),
]
