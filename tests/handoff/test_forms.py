"""Layers and heads of ranks for the ranks of another worker: the rule, in memory, and through a loader."""

import functools
import itertools
import random
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from baton.handoff import digests, transports
from baton.handoff.channels import HandoffClient
from baton.handoff.forms import CacheLayer, Division, Form, heads_of, position, shares, unfit
from baton.handoff.groups import CacheGroup, Part
from baton.handoff.load.loader import Loader
from baton.handoff.load.pull import LoadJob
from baton.handoff.manifest import form_of, seal
from baton.handoff.memory.blocks import block_cache
from baton.handoff.memory.cache import HostBlockCache
from baton.handoff.memory.device import DeviceBlockCache
from baton.handoff.save.saver import SaveJob
from baton.kernels.kv_pack import WIRE_DTYPES
from harness.support import PATIENCE
from tests.handoff.caches import Source, puller, random_blocks, source
from tests.handoff.host_device import HostDevice

BLOCKS, TOKENS = 9, 16
GROUPS = (CacheGroup(TOKENS), CacheGroup(TOKENS, window=TOKENS * BLOCKS))
LAYERS = {"heads.0": 4, "heads.1": 4, "tokens.0": 2, "mla.0": 1, "window.0": 8}
NAMES = [["heads.0", "heads.1", "tokens.0", "mla.0"], ["window.0"]]


@functools.cache
def whole(seed):
    """The KV of all heads: with heads first, with tokens first, of MLA, and of a window's group."""
    generator = torch.Generator().manual_seed(seed)

    def fresh(heads, channels):
        return torch.randn(BLOCKS, heads, TOKENS, channels, generator=generator).bfloat16()

    return {
        "heads.0": fresh(4, 64),
        "heads.1": fresh(4, 64).float(),
        "tokens.0": fresh(2, 128),
        "mla.0": fresh(1, 576),
        "window.0": fresh(8, 64),
    }


STAGES = {
    1: [list(LAYERS)],
    2: [["heads.0", "mla.0"], ["heads.1", "tokens.0", "window.0"]],  # the first one lacks a group
    3: [["heads.0", "heads.1"], ["mla.0", "tokens.0"], ["window.0"]],
}
WIDTHS = {"heads.0": 32, "heads.1": 32, "tokens.0": 64, "mla.0": 576, "window.0": 32}


def caches(seed, ranks, wire="auto", stages=1, *, device=False):
    """The caches of a worker's ranks, of `ranks` in each stage; layer `tokens.0` has tokens first."""
    made = []
    for stage, rank in itertools.product(range(stages), range(ranks)):
        own = {}
        for name in STAGES[stages][stage]:
            tensor = whole(seed)[name]
            heads = heads_of(layer(name, LAYERS[name]), ranks, rank)
            own[name] = tensor[:, heads.start : heads.stop].clone(memory_format=torch.contiguous_format)
            if name == "tokens.0":
                tokens_first = own[name].transpose(1, 2)
                own[name] = torch.empty(tokens_first.shape).bfloat16().copy_(tokens_first).transpose(1, 2)
        division = Division(rank, ranks, LAYERS)
        cache = block_cache(own, BLOCKS, wire, WIDTHS, NAMES, division=division)
        if device:
            size = 3 * cache.record_bytes
            cache = DeviceBlockCache(
                cache.layers, cache._tables, division, device=HostDevice(), load_bytes=size
            )
        made.append(cache)
    layers = [cache.layers for cache in made[::ranks]]
    for number, cache in enumerate(made):
        cache.join(layers, number // ranks)
    return made


def layer(name, heads):
    return CacheLayer(name, "bfloat16", (heads, TOKENS, 64), (1, 1, 1), heads * TOKENS * 128, 32, heads)


def content(cache, group, blocks):
    """The bytes of a rank's blocks, in the cache's own dtype."""
    ids, numbers = list(blocks), cache.form.layers_of(cache.rank, len(cache.layers))
    count = sum(cache.layers[number].group == group for number in numbers)
    layers = cache._tables[group].blocks[:count]  # leave out padding
    empty = torch.empty(0, dtype=torch.uint8)
    return torch.cat([empty, *(one[ids].flatten().view(torch.uint8) for one in layers)]).numpy()


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        *(((1, 1), (2, 1)), ((2, 1), (1, 1)), ((4, 1), (2, 1)), ((2, 1), (2, 1))),
        *(((1, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 3), (1, 2)), ((1, 2), (1, 2)), ((2, 2), (1, 3))),
        *(((1, 3), (2, 2)), ((2, 2), (2, 3))),
    ],
    ids=lambda form: f"{form[0]}x{form[1]}",
)
def test_a_rank_finds_its_heads_in_any_form(there, here, wire, device):
    """Unquantised KV is equal bit by bit; quantised KV is as if the rank had pulled its own records.

    there, here: ranks of a stage, and stages.
    """
    sources = caches(1, there[0], wire, there[1])
    blocks, into = random_blocks(BLOCKS, 5, 1), random_blocks(BLOCKS, 5, 3)
    own_wire = "auto" if device else "int8"
    for rank, cache in enumerate(caches(2, here[0], own_wire, here[1], device=device)):
        alike, target = caches(1, here[0], wire, here[1])[rank], caches(2, here[0], wire, here[1])[rank]
        assert isinstance(target, HostBlockCache)
        for group in range(len(NAMES)):
            sent = np.empty((5, alike.record_bytes), np.uint8)
            alike.gather(group, blocks, sent)
            target.scatter(group, sent, into)
        for share in shares(cache.layers, cache.form, rank, sources[0].form, turn=1):
            for group in {cache.layers[cut.layer].group for cut in share.cuts}:
                sent = np.empty((5, share.record_bytes), np.uint8)
                saved = digests.seeded(sources[share.rank].gather(group, blocks, sent), 7, 0)
                with closing(cache.landing("KV of a test", 7, share=share)) as landing:
                    landing.take(Part(group, 0, into), sent, saved)
                    landing.finish()
        for group in range(len(NAMES)):
            everything = tuple(range(BLOCKS))
            assert np.array_equal(content(cache, group, everything), content(target, group, everything))
        cache.close()


def test_the_whole_cache_is_described_alike_by_every_rank():
    """The compatibility hash covers this description."""
    one, two, four, *piped = (caches(1, *form) for form in ((1,), (2,), (4,), (2, "auto", 2), (1, "int8", 3)))
    assert {cache.layers for cache in itertools.chain(one, two, four, *piped)} == {one[0].layers}
    assert [each.name for each in one[0].layers] == ["heads.0", "heads.1", "mla.0", "tokens.0", "window.0"]
    assert [each.heads for each in one[0].layers] == [4, 4, 1, 2, 8]
    assert [each.stretches for each in one[0].layers] == [1, 1, 1, TOKENS, 1]
    assert [cache.form.stages for cache in piped[0]] == [((0, 2), (1, 3, 4))] * 4
    assert [cache.rank for cache in piped[0]] == [0, 1, 2, 3]


def test_layers_are_in_order_of_their_numbers():
    names = ["layers.10.attn", "layers.9.k", "layers.9.attn", "mtp.0.attn", "layers.2.attn"]
    assert sorted(names, key=position) == [names[4], names[2], names[1], names[0], names[3]]


def test_a_layer_whose_heads_do_not_fit_together_is_not_divided():
    """Its description, and so the hash, depends on the number of ranks."""
    found = []
    for ranks in (1, 2):
        tensor = torch.zeros(BLOCKS, 3 // ranks, TOKENS, 64)
        cache = block_cache({"a": tensor}, BLOCKS, division=Division(0, ranks, {"a": 4}))
        found.append(cache.layers)
        assert cache.layers[0].heads == 0
    assert found[0] != found[1]
    assert "layer a comes from 1 ranks or not at all" in unfit(found[0], Form(1, "auto"), Form(2, "auto"))
    assert unfit(found[0], Form(1, "auto"), Form(1, "int8")) == ""


def split(draw, layers):
    """The layers of up to four stages; of each, some in the middle are missing from most stages' groups."""
    count = draw.randint(1, min(4, layers))
    cuts = [0, *sorted(draw.sample(range(1, layers), count - 1)), layers]
    order = draw.sample(range(layers), layers)  # numbered by group, so a stage's numbers are not contiguous
    stages = tuple(tuple(sorted(order[first:stop])) for first, stop in itertools.pairwise(cuts))
    return stages if count > 1 else ()


@pytest.mark.parametrize(("there", "here"), list(itertools.product((1, 2, 3, 4, 6, 12), repeat=2)))
def test_each_head_comes_once_and_each_shard_is_released(there, here):
    """Any layers may be in each stage."""
    draw = random.Random(12 * there + here)
    for _ in range(8):
        layers = [layer(str(number), draw.choice((1, 12))) for number in range(draw.randint(1, 7))]
        source, target = (
            Form(there, "auto", split(draw, len(layers))),
            Form(here, "auto", split(draw, len(layers))),
        )
        assert unfit(layers, target, source) == ""
        released = {}
        for rank in range(target.shards):
            found = {number: [] for number in target.layers_of(rank, len(layers))}
            for share in shares(layers, target, rank, source, turn=3):
                released.setdefault(share.rank, []).append(share.readers)
                for cut in share.cuts:
                    assert cut.layer in source.layers_of(share.rank, len(layers))
                    one = layers[cut.layer]
                    theirs = heads_of(one, there, share.rank)[cut.there : cut.there + cut.count]
                    ours = heads_of(one, here, rank)[cut.here : cut.here + cut.count]
                    assert theirs == ours
                    found[cut.layer] += ours
            assert {number: sorted(heads) for number, heads in found.items()} == {
                number: list(heads_of(layers[number], here, rank)) for number in found
            }
        assert sorted(released) == list(range(source.shards))
        assert all(readers == [len(readers)] * len(readers) for readers in released.values())


@pytest.mark.parametrize("stages", [((0, 1), (1, 2)), ((0,), (2,)), ((0, 1, 2, 3), (4,)), ((), (0, 1, 2))])
def test_stages_that_do_not_have_each_layer_once_are_refused(stages):
    layers = [layer(str(number), 1) for number in range(3)]
    found = unfit(layers, Form(1, "auto"), Form(1, "auto", stages))
    assert found == ("" if stages[0] == () else "the stages of its shards do not have each of 3 layers once")


def test_replicated_heads_are_pulled_from_varying_ranks():
    mla = [layer("mla", 1)]
    asked = [
        [share.rank for share in shares(mla, Form(1, "auto"), 0, Form(4, "auto"), turn) if share.cuts]
        for turn in range(4)
    ]
    assert asked == [[0], [1], [2], [3]]


def test_ranks_that_do_not_divide_the_heads_are_refused():
    found = unfit([layer("a", 4)], Form(1, "auto"), Form(3, "auto"))
    assert found == "3 shards do not divide the 4 heads of layer a"
    assert unfit([layer("a", 4)], Form(1, "auto"), Form(0, "auto")).startswith("0 shards")


@dataclass
class Workers:
    """The ranks of a source and of a puller."""

    sources: list[Source]
    loaders: list[Loader]
    right: list[HostBlockCache]  # the sources' KV, divided among the puller's ranks

    def begin(self, blocks, tokens, *, first):
        """Save the first records on all ranks; return the manifest, and the other jobs."""
        parts = [Part(0, 0, blocks), Part(1, len(blocks), blocks)]
        manifest = self.save(
            SaveJob("r", 1, (parts[0].within(0, first),), 2 * len(blocks), last=False), tokens
        )
        rest = (parts[0].within(first, len(blocks)), parts[1])
        return manifest, [SaveJob("r", 1, rest, 2 * len(blocks)) for _ in self.sources]

    def save(self, job, tokens):
        """Save on all ranks; return the manifest."""
        found = []
        for one in self.sources:
            saved = one.saver.save(job)
            assert saved is not None
            found.append(one.manifest("r", tokens, job.num_records, saved))
        manifest = found[0]
        for other in found[1:]:
            manifest.shards.append(other.shards[0])
        return seal(manifest)

    def held(self):
        return sum(one.staging.held()[0] for one in self.sources)

    def check(self, eventually, blocks, into):
        """Check that each loader brings its groups' blocks, unless they are quantised, and the saves end."""
        for loader, right in zip(self.loaders, self.right, strict=True):
            cache = loader._cache
            groups = {cache.layers[one].group for one in cache.form.layers_of(cache.rank, len(cache.layers))}
            (done,) = eventually(loader.take_finished)
            assert (done.problem, done.blocks) == (None, 6 * len(groups))
            if right.form.wire_dtype == "auto":
                for group in range(2):
                    found = content(cache, group, into)
                    assert np.array_equal(found, content(right, group, blocks))
        eventually(lambda: self.held() == 0)


@contextmanager
def workers(there, here, transport, wire="auto"):
    """there, here: ranks of a stage, and stages."""
    with ExitStack() as stack:

        def kept(made):
            return stack.enter_context(closing(made))

        made = enumerate(caches(1, there[0], wire, there[1]))
        sources = [kept(source(cache, groups=GROUPS, rank=rank)) for rank, cache in made]
        client, loaders = kept(HandoffClient()), []
        for cache in caches(2, here[0], stages=here[1]):
            pulling = [kept(one) for one in transports.create([transport])]
            times = {"pull_timeout_s": 10 * PATIENCE, "chunk_bytes": 3 * cache.record_bytes}
            loaders.append(kept(Loader(cache, puller(cache, GROUPS), pulling, client, **times)))
        yield Workers(sources, loaders, caches(1, here[0], wire, here[1]))


@pytest.mark.parametrize(
    ("there", "here", "transport", "wire"),
    [
        *(((2, 1), (1, 1), "shm", "auto"), ((1, 1), (2, 1), "tcp", "auto"), ((2, 1), (1, 1), "tcp", "int8")),
        *(((4, 1), (2, 1), "shm", "auto"), ((1, 2), (1, 1), "shm", "auto"), ((1, 1), (1, 3), "tcp", "auto")),
        *(((2, 2), (1, 3), "shm", "int8"), ((1, 2), (1, 2), "tcp", "auto")),
    ],
)
def test_each_rank_gets_its_heads_early_or_not_and_the_last_one_releases(
    there, here, transport, wire, eventually
):
    blocks, into = random_blocks(BLOCKS, 6, 1), random_blocks(BLOCKS, 6, 3)
    with workers(there, here, transport, wire) as made:
        manifest, rest = made.begin(blocks, 6 * TOKENS, first=4)
        parts = (Part(0, 0, into), Part(1, 6, into))
        job = LoadJob("r", 1, manifest.num_tokens, parts, manifest=manifest)
        for loader in made.loaders:
            loader.reserve(job if loader is made.loaders[0] else replace(job, manifest=None))
        running = made.loaders[0]._loads["r", 1].progress
        # shards are pulled concurrently: the available records of each arrive while the prompt is computed
        wanted = 4 * sum(
            share.record_bytes
            for share in made.loaders[0]._puller.shares(form_of(manifest), 0)
            if any(cut.layer < len(NAMES[0]) for cut in share.cuts)
        )
        eventually(lambda: running.bytes == wanted)
        for one, job_left in zip(made.sources, rest, strict=True):
            assert one.saver.save(job_left) is not None
        for loader in made.loaders[1:]:
            assert made.held() >= 1
            loader.complete(job.key, manifest)
        made.loaders[0].complete(job.key, manifest)
        made.check(eventually, blocks, into)


@pytest.mark.parametrize(
    ("there", "here", "transport"),
    [
        *(((1, 1), (2, 1), "shm"), ((1, 1), (2, 1), "tcp"), ((2, 1), (1, 1), "shm")),
        *(((1, 1), (1, 2), "shm"), ((1, 1), (1, 3), "tcp"), ((2, 1), (1, 2), "shm"), ((2, 2), (1, 3), "tcp")),
    ],
)
def test_a_window_serves_every_rank(there, here, transport, eventually):
    """Slots are reused when the last rank has taken their records, or has released them untaken."""
    blocks, into = random_blocks(BLOCKS, 6, 1), random_blocks(BLOCKS, 6, 3)
    parts = (Part(0, 0, blocks), Part(1, 6, blocks))
    with workers(there, here, transport) as made:
        manifest = made.save(SaveJob("r", 1, parts, 12, slots=4), 6 * TOKENS)
        assert {shard.slots for shard in manifest.shards} == {4}
        into_both = (Part(0, 0, into), Part(1, 6, into))
        job = LoadJob("r", 1, manifest.num_tokens, into_both, manifest=manifest, complete=True)
        for loader in made.loaders:
            loader.reserve(job)
        made.check(eventually, blocks, into)
