"""Encode workers compute images for workers that run prompts. Whatever fails, the request gets its answer."""

import contextlib
import gc
import random
from dataclasses import replace
from functools import partial

import pytest

from baton.attempts import Attempt
from baton.block_log import Change
from baton.prefix_keys import image_key
from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_ENCODE, PHASE_PREFILL, Failed
from baton.scheduler.errors import NoCapacity
from baton.scheduler.need import Need
from baton.services.engine import wire
from baton.services.router.encodes import Encodes
from baton.services.router.leg import Leg
from baton.services.router.placement import Placements
from baton.services.router.relay import Relay
from harness import scheduling
from harness.fake_worker import FakeWorker, Fault, answer, until
from tests.services.router import test_images
from tests.services.router.asking import booked, share
from tests.services.router.test_images import feature, sent

PROMPT = list(range(60))
A, B = feature("a", 4), feature("b", 20)
CODES = (Failed.CODE_FULL, Failed.CODE_DRAINING, Failed.CODE_ENGINE, Failed.CODE_STALE)
FAULTS = [Fault(PHASE_ENCODE, die=True), *(Fault(PHASE_ENCODE, failed=code) for code in CODES)]


async def encoders(cluster, number=1, *, connect=True):
    names = [f"e{one}" for one in range(number)]
    found = [await cluster.members.add(FakeWorker(name, pb.ROLE_ENCODE)) for name in names]
    for worker in found if connect else ():
        await cluster.connect(worker)

    async def known():
        await cluster.scheduler.refresh()
        return sum(one.identity.role == pb.ROLE_ENCODE for one in cluster.scheduler.standby.workers) == number

    await scheduling.until(known)
    return found


send, ask = partial(test_images.send, prompt=PROMPT), partial(test_images.ask, prompt=PROMPT)


def images(worker, attempt=-1):
    prompts = [one for one in worker.seen.starts if one.phase != PHASE_ENCODE]
    return [one.identifier for one in prompts[attempt].encoded]


def encodes(*workers):
    return [one for worker in workers for one in worker.seen.starts if one.phase == PHASE_ENCODE]


def where(cluster):
    places = ("encode", "held", "prompt")
    return tuple(int(cluster.count("images_computed_total", where=one)) for one in places)


async def test_two_images_are_computed_by_two_encode_workers(cluster):
    prefill, decode = await cluster.pair()
    workers = await encoders(cluster, 2)
    await ask(cluster, A, B, feature("a", 30))
    assert sorted(name for worker in workers for name in sent(worker)) == ["a", "b"]
    assert all(len(worker.seen.starts) == 1 for worker in workers)
    assert (sent(prefill), sent(decode), images(prefill), images(decode)) == ([], [], ["a", "b"], [])
    for start in encodes(*workers):
        request = wire.decode_request(start.engine_request)
        [one] = request.mm_features
        assert (one.mm_position.offset, one.mm_position.length, len(request.prompt_token_ids)) == (0, 4, 4)
        assert set(one.data) == {"image_grid_thw"}
        assert (start.epoch, len(start.key), start.left_s > 0) == (prefill.seen.starts[0].epoch, 16, True)
    assert where(cluster) == (2, 0, 0)
    load = cluster.counts.message([])
    assert (sum(load.images), load.image_tokens) == (2, 8)  # an image twice counts once
    record = cluster.chronicle.recent.last(1)[0]
    stages = {stage.name: stage for stage in record.to_first_token}
    assert stages["encode"].attributes == {"images": 2}
    assert stages["encode"].process.service == "baton-encode"


async def test_a_holder_gets_no_image_and_computes_nothing(cluster):
    prefill, _ = await cluster.pair()
    _, holder = await encoders(cluster, 2)
    holder.shelf.add("a")
    holder.blocks.take(Change(stored=[image_key("a")]))
    known, key = cluster.server._servicer.prefixes, image_key("a")
    await until(lambda: known.index.holders(key) & known.of_role(pb.ROLE_ENCODE), "the holder is known")
    await ask(cluster, A)
    assert (images(prefill), sent(holder), where(cluster)) == (["a"], [], (0, 1, 0))
    assert [one.prompt_tokens for one in encodes(holder)] == [1]


async def test_an_image_that_comes_again_goes_to_its_holder_at_once(cluster, monkeypatch):
    """The scheduler knows it from the end of the encode, before the encode worker reports it."""
    await cluster.pair()
    workers = await encoders(cluster, 4)
    for worker in workers:
        await until(lambda name=worker.worker_id: name in cluster.server._servicer.prefixes, "it reports")
        monkeypatch.setattr(worker.blocks, "take", lambda _: None)
    for _ in range(4):
        await ask(cluster, A)
    assert where(cluster) == (1, 3, 0)
    assert len({start.key for start in encodes(*workers)}) == 4
    assert sum(bool(encodes(worker)) for worker in workers) == 1


async def test_a_small_image_stays_with_the_prompt(cluster):
    cluster.remake(encode_min_tokens=5)
    prefill, _ = await cluster.pair()
    [encoder] = await encoders(cluster)
    await ask(cluster, A)
    assert (sent(prefill), encodes(encoder), where(cluster)) == (["a"], [], (0, 0, 1))
    assert not cluster.counts.message([]).image_tokens


async def test_an_image_that_is_cached_with_the_prompt_is_not_encoded(cluster):
    """Here the prompt's first 16 of 17 tokens are cached, with image B alone behind them."""
    prefill, _ = await cluster.pair()
    [encoder] = await encoders(cluster)
    place = cluster.scheduler.place

    async def cached(need):
        placement = await place(need)
        return placement if need.encode else replace(placement, prompt_tokens=need.prompt_tokens - 16)

    cluster.scheduler.place = cached
    await ask(cluster, A, B)
    assert (images(prefill), sent(prefill), sent(encoder)) == (["b"], ["a"], ["b"])
    assert where(cluster) == (1, 0, 0)


async def test_without_encode_workers_nothing_is_asked(cluster, monkeypatch):
    prefill, _ = await cluster.pair()
    await cluster.scheduler.refresh()
    assert not cluster.scheduler.standby.fleet.encoders
    monkeypatch.delattr(Placements, "encode")
    await ask(cluster, A)
    assert (sent(prefill), images(prefill), where(cluster)) == (["a"], [], (0, 0, 1))
    assert cluster.counts.message([]).image_tokens == 4  # one may be started for more of them
    monkeypatch.delattr(Encodes, "place")
    await ask(cluster)


async def test_full_encode_workers_leave_images_with_the_prompt(cluster):
    """The image does not wait, and nobody waits for it."""
    prefill, _ = await cluster.pair()
    [encoder] = await encoders(cluster)
    others = [Attempt(f"other{number}", 1) for number in range(1_000)]
    with contextlib.suppress(NoCapacity):
        for one in others:
            await cluster.scheduler.place(Need(one, "r1", 2_048, 0, encode=True))
    await ask(cluster, A)
    assert (sent(prefill), encodes(encoder), where(cluster)) == (["a"], [], (0, 0, 1))
    assert not cluster.server._servicer.placer.turns.any
    for one in others:
        cluster.scheduler.reports.finished(one, "stop")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: "dies" if one.die else f"code {one.failed}")
async def test_an_image_whose_encode_fails_is_computed_with_the_prompt(cluster, fault):
    """The same workers go on at once; another image still goes to another encode worker."""
    cluster.remake(max_attempts=1)
    prefill, decode = await cluster.pair()
    workers = await encoders(cluster, 2)
    shared = share(workers, fault)
    await ask(cluster, A, B)
    assert not shared
    assert [start.epoch for start in prefill.seen.starts] == [start.epoch for start in decode.seen.starts]
    [failed] = [name for name in ("a", "b") if name not in images(prefill)]
    assert sent(prefill) == [failed]
    assert cluster.count("images_computed_total", where="prompt") == 1
    [record] = cluster.chronicle.recent.last(1)
    [attempt] = record.attempts
    assert attempt.trouble == "encode"
    assert [one.name for one in record.events] == ["failed", "without encode"]
    assert "encode worker e" in record.events[0].attributes["message"]


async def test_an_encode_worker_that_is_not_there(cluster):
    prefill, _ = await cluster.pair()
    [encoder] = await encoders(cluster, connect=False)
    await encoder.die()
    await ask(cluster, A)
    assert sent(prefill) == ["a"]
    await ask(cluster, B)  # avoided
    assert (sent(prefill), cluster.count("retries_total", trouble="encode", worker="e0")) == (["a", "b"], 1)


async def test_an_encode_worker_that_lacks_an_image_gets_it_once_more(cluster):
    prefill, _ = await cluster.pair()
    [encoder] = await encoders(cluster)
    await ask(cluster, A)
    encoder.shelf.clear()
    encoder.images.clear()
    await ask(cluster, A)
    assert (sent(encoder), sent(prefill)) == (["a", "a"], [])
    encoder.faults.extend(Fault(PHASE_ENCODE, failed=Failed.CODE_MEDIA) for _ in range(2))
    await ask(cluster, A)
    assert (sent(encoder), sent(prefill), images(prefill)) == (["a", "a", "a"], ["a"], [])


async def test_embeddings_that_do_not_come_are_computed_with_the_prompt(cluster):
    """Then the two workers may not reach each other: other requests avoid the pair for a while."""
    now = 100.0
    cluster.remake(max_attempts=1, pairs_clock=lambda: now)
    prefill, _ = await cluster.pair()
    await encoders(cluster)
    prefill.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_MEDIA))
    await ask(cluster, A)
    assert (images(prefill, 0), images(prefill, 1), sent(prefill)) == (["a"], [], ["a"])
    await ask(cluster, B)
    assert (sent(prefill), images(prefill)) == (["a", "b"], [])
    now += 60
    await ask(cluster, A)
    assert images(prefill) == ["a"]


async def test_only_the_images_that_did_not_come_are_computed_with_the_prompt(cluster):
    prefill, _ = await cluster.pair()
    workers = await encoders(cluster, 2)
    prefill.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_MEDIA, images=("a",)))
    await ask(cluster, A, B)
    assert [sorted(images(prefill, attempt)) for attempt in (0, 1)] == [["a", "b"], ["b"]]
    assert sent(prefill) == ["a"]
    assert sorted(name for worker in workers for name in sent(worker)) == ["a", "b"]  # B only once
    assert where(cluster)[2] == 1


async def test_an_image_that_the_prompts_worker_has_dropped_is_sent_again(cluster):
    """The other image's embeddings are not at fault."""
    cluster.remake(encode_min_tokens=5)
    prefill, _ = await cluster.pair()
    large = replace(feature("c", 30), mm_position=replace(feature("c", 30).mm_position, length=8))
    await encoders(cluster)
    await ask(cluster, A)
    prefill.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_MEDIA, images=("a",)))
    await ask(cluster, A, large)
    assert (sent(prefill), images(prefill)) == (["a", "a"], ["c"])
    assert cluster.count("retries_total", trouble="encode", worker="p0") == 0


async def test_a_retry_elsewhere_uses_the_embeddings_again(cluster):
    first, second, _ = await cluster.pair(prefill=2)
    [encoder] = await encoders(cluster)
    share((first, second), Fault(PHASE_PREFILL, die=True))
    await ask(cluster, A)
    assert (images(first), images(second)) == (["a"], ["a"])
    assert (sent(encoder), sent(first), sent(second)) == (["a"], [], [])
    assert len({(start.request_id, start.epoch) for start in encodes(encoder)}) == 2


async def test_a_decode_worker_that_computes_the_prompt_gets_embeddings(cluster):
    [decode] = await cluster.pair(prefill=0)
    [encoder] = await encoders(cluster)
    await ask(cluster, A)
    assert (images(decode), sent(decode), sent(encoder)) == (["a"], [], ["a"])
    encoder.faults.append(Fault(PHASE_ENCODE, die=True))
    await ask(cluster, B)
    assert (images(decode), sent(decode)) == ([], ["b"])


async def test_an_aborted_request_aborts_its_encodes(cluster):
    await cluster.pair()
    [encoder] = await encoders(cluster)
    encoder.faults.extend(Fault(PHASE_ENCODE, silent=True) for _ in range(2))
    name = await send(cluster, A, B)
    await booked(cluster, "e0", requests=2, prompt_tokens=8, blocks=0)
    await until(lambda: len(encoder.running) == 2, "both are under way")
    cluster.client.abort([name])
    await until(lambda: not encoder.running, "they are aborted")
    await booked(cluster, "e0", requests=0, prompt_tokens=0)


async def test_an_encode_that_nobody_needs_is_aborted(cluster):
    """The prompt's worker had it cached, image and all."""
    prefill, decode = await cluster.pair()
    [encoder] = await encoders(cluster)
    prefill.cached = True
    encoder.faults.append(Fault(PHASE_ENCODE, silent=True))
    decode.faults.append(Fault(PHASE_DECODE, after_tokens=2, silent=True))
    name = await send(cluster, A)
    await until(lambda: len(cluster.got[name].tokens) > 2, "the answer has begun")
    await until(lambda: encoder.seen.aborts and not encoder.running, "the encode is aborted")
    await booked(cluster, "e0", requests=0, prompt_tokens=0)
    decode.go_on()
    assert (await cluster.answer(name)).tokens == answer(PROMPT, 8)


async def test_encodes_without_a_scheduler(cluster):
    prefill, _ = await cluster.pair()
    [encoder] = await encoders(cluster)
    await cluster.lose_scheduler()
    await ask(cluster, A)
    assert (images(prefill), sent(encoder)) == (["a"], ["a"])
    assert not cluster.scheduler.reports.held


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_fails_nothing_stays_booked(cluster, seed):
    """Requests with random images on workers that fail at random, some of them aborted."""
    random_ = random.Random(seed)
    prefills_and_decode = await cluster.pair(prefill=2)
    workers = await encoders(cluster, 3)
    codes = (Failed.CODE_FULL, Failed.CODE_MEDIA, Failed.CODE_ENGINE)
    for worker in workers:
        for _ in range(6):
            fails = random_.random() < 0.5
            fault = {"failed": random_.choice(codes)} if fails else {"silent": True}
            worker.faults.append(Fault(PHASE_ENCODE, **fault))
    for prefill in prefills_and_decode[:2]:
        prefill.faults.append(Fault(PHASE_PREFILL, failed=random_.choice(codes)))
    some = [feature(name, 4 + 5 * number) for number, name in enumerate("abcdef")]
    names = [await send(cluster, *random_.sample(some, 3)) for _ in range(12)]
    await until(lambda: any(encodes(*workers)), "encodes are under way")
    await random_.choice(workers).die()
    for name in names[::2]:
        cluster.client.abort([name])
    for worker in workers:
        worker.faults.clear()
        worker.go_on()
    for name in names[1::2]:
        found = await cluster.answer(name)
        assert (found.error, found.tokens) == (None, answer(PROMPT, 8))
    await until(lambda: not cluster.scheduler.reports.held, "nothing is booked")


@pytest.mark.usefixtures("no_garbage_collection")
async def test_nothing_of_an_ended_request_waits_for_the_garbage_collector(cluster):
    await cluster.pair()
    await encoders(cluster)
    await ask(cluster, A, B)
    await until(lambda: cluster.client.live == 0, "it has ended")
    kinds = Relay, Encodes, Leg
    await until(lambda: not any(isinstance(one, kinds) for one in gc.get_objects()), "all is gone")
