"""ENCODEs and prompts that bring embeddings, between two dispatchers over gRPC, with a real shelf."""

from contextlib import closing

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason

from baton.handoff.config import HandoffConfig
from baton.handoff.embeddings import Embeddings, Form
from baton.handoff.load.embeddings import EmbeddingPuller
from baton.handoff.save import sizing
from baton.handoff.save.shelf import Shelf
from baton.handoff.vllm.ec_connector import EMBEDDINGS, is_whole
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_ENCODE, PHASE_PREFILL, PHASE_SAVE, Failed, Start
from baton.services.engine import wire
from baton.services.engine.images import metadata_of
from baton.services.roles import ENCODE
from baton.services.worker import embeddings as module
from baton.services.worker import outgoing
from harness.fake_worker import until
from tests.services.engine.test_images import feature, item
from tests.services.worker.idle_worker import KEY, Engine, Worker
from tests.services.worker.router import prompt, request
from tests.services.worker.test_following import serving

FORM = Form("abc", 8, "float32")
ROWS = 4
A, B = "a" * 64, "b" * 64


class Prompts(Engine):
    def embedding_puller(self):
        return EmbeddingPuller("prompts", FORM, ["shm"])


@pytest.fixture
async def encoder(monkeypatch):
    monkeypatch.setattr(sizing, "EMBEDDINGS_BYTES", 1 << 20)
    config = HandoffConfig("encoder", ["shm"], "127.0.0.1", 0, None, "auto")
    with closing(Shelf(config, FORM.compatibility_hash)) as shelf:
        shelf.row_bytes = FORM.row_bytes
        engine = Engine()
        engine.shelf = shelf
        async with serving(engine, images=True, image_tokens=ROWS) as site:
            site.dispatcher.become(ENCODE)
            yield site


@pytest.fixture
async def prompts():
    worker = Worker(Prompts(), images=True, image_tokens=ROWS)
    yield worker
    await worker.dispatcher.close()


def encoding(name, image=A, epoch=1):
    core = request("image", prompt(ROWS), max_tokens=1)
    core.mm_features = [metadata_of(feature(0, ROWS, image))]
    encoded = wire.encode_request(core)
    return Start(request_id=name, epoch=epoch, phase=PHASE_ENCODE, engine_request=encoded, key=KEY)


def asking(encoder, name, images, phase=PHASE_DECODE):
    """Return the Start of a prompt. images: with the encode, or "" for one that comes along."""
    core = request(name, prompt(20))
    core.mm_features = [metadata_of(feature(1 + ROWS * at, ROWS, one)) for at, one in enumerate(images)]
    start = Start(request_id=name, epoch=1, phase=phase, engine_request=wire.encode_request(core))
    for image, encode in images.items():
        if encode:
            one = start.encoded.add(identifier=image)
            one.source.request_id, one.source.key = encode, KEY
            one.source.address = f"127.0.0.1:{encoder.port}"
    return start


def sent(worker, *images):
    for image in images:
        worker.session.received.add(image, item(), 10)


def put(site, image, seed=1):
    data = np.random.default_rng(seed).integers(0, 256, ROWS * FORM.row_bytes, np.uint8)
    made = Embeddings(data, ROWS, FORM.width, FORM.dtype)
    site.engine.shelf.put(image, made)
    return made


def kept(site, name, image=A):
    """Start an encode whose embeddings are on the shelf."""
    put(site, image)
    site.start(encoding(name, image))


def begun(site, name, image=A):
    """Start an encode that the engine must compute."""
    sent(site, image)
    site.start(encoding(name, image))


def computed(site, name, image, seed=1):
    """Have the engine compute an image, as its connector and its step report it."""
    made = put(site, image, seed)
    site.step(end(name))
    return made


def end(name):
    return EngineCoreOutput(request_id=f"{name}#1", new_token_ids=[], finish_reason=FinishReason.STOP)


def told(worker):
    return [(one.request_id, one.problem) for reply in worker.replies() for one in reply.saved]


async def missing(worker):
    one = await worker.failure()
    assert one.code == Failed.CODE_MEDIA
    return list(one.images)


async def entered(worker, name):
    await until(lambda: f"{name}#1" in worker.engine.requests, f"{name} enters")
    return worker.engine.requests[f"{name}#1"]


async def test_a_prompt_enters_once_all_its_embeddings_are_here(encoder, prompts):
    prompts.start(asking(encoder, "p", {A: "one", B: "two"}))
    for name, one in (("one", A), ("two", B)):
        begun(encoder, name, one)
    assert [is_whole(one) for one in encoder.engine.requests["one#1"].mm_features] == [True]
    first = computed(encoder, "one", A)
    assert told(encoder) == [("one", "")]
    await until(lambda: prompts.count("embeddings_loaded", transport="shm") == 1, "the first is here")
    assert prompts.engine.submitted == []
    second = computed(encoder, "two", B, seed=2)
    found = await entered(prompts, "p")
    brought = getattr(found, EMBEDDINGS)
    assert (brought[A].data == first.data).all()
    assert (brought[B].data == second.data).all()
    assert [is_whole(one) for one in found.mm_features] == [False, False]


async def test_an_image_on_the_shelf_is_not_computed(encoder, prompts):
    kept(encoder, "one")
    assert told(encoder) == [("one", "")]
    assert (encoder.engine.submitted, encoder.dispatcher.requests) == ([], 0)
    shelf = encoder.dispatcher.encodes.kept()
    assert (shelf.images, shelf.computed, shelf.found) == (1, 0, 1)
    prompts.start(asking(encoder, "p", {A: "one"}, PHASE_PREFILL))
    await entered(prompts, "p")


async def test_embeddings_beside_an_image_that_was_sent(encoder, prompts):
    kept(encoder, "one")
    sent(prompts, B)
    prompts.start(asking(encoder, "p", {A: "one", B: ""}))
    prompts.start(asking(encoder, "next", {B: ""}))  # the waiting request keeps its images
    found = await entered(prompts, "p")
    assert [is_whole(one) for one in found.mm_features] == [False, True]
    assert list(getattr(found, EMBEDDINGS)) == [A]


async def test_an_image_that_nobody_sent(encoder, prompts):
    prompts.start(asking(encoder, "p", {A: "one"}))
    encoder.start(encoding("one"))
    await encoder.fails(Failed.CODE_MEDIA, A)
    await prompts.fails(Failed.CODE_MEDIA, A)
    prompts.start(asking(encoder, "q", {A: "one", B: ""}))
    await prompts.fails(Failed.CODE_MEDIA, B)


async def test_a_full_shelf(encoder, prompts):
    most = encoder.engine.shelf.size()[2] // FORM.row_bytes - 1
    data = np.zeros(most * FORM.row_bytes, np.uint8)
    begun(encoder, "one")
    encoder.engine.shelf.put(B, Embeddings(data, most, FORM.width, FORM.dtype))
    encoder.step(end("one"))
    [(name, problem)] = told(encoder)
    assert (name, "StagingFull" in problem) == ("one", True)
    begun(encoder, "two")
    assert (await encoder.failure()).code == Failed.CODE_FULL
    prompts.start(asking(encoder, "p", {A: "one"}))
    assert (await prompts.failure()).code == Failed.CODE_MEDIA


async def test_the_router_is_told_which_image_is_missing(encoder, prompts, monkeypatch):
    monkeypatch.setattr(outgoing, "WAIT_S", 0.05)
    kept(encoder, "two", B)
    prompts.start(asking(encoder, "p", {A: "none", B: "two"}))
    assert await missing(prompts) == [A]
    prompts.start(asking(encoder, "q", {A: "", B: "two"}))
    assert await missing(prompts) == [A]


async def test_requests_wait_for_room_for_embeddings(encoder, prompts, monkeypatch):
    room = prompts.dispatcher._entrance._embeddings.room
    room.fit(2 * ROWS * FORM.row_bytes)
    for name, image in (("one", A), ("two", B)):
        kept(encoder, name, image)
    for name, images in (("p", {A: "one"}), ("q", {A: "one", B: "two"}), ("r", {B: "two"})):
        prompts.start(asking(encoder, name, images))
    await entered(prompts, "p")
    await until(lambda: len(room._waiting) == 2, "Q waits, and R behind it")
    prompts.dispatcher.abort(["q"])
    await entered(prompts, "r")
    monkeypatch.setattr(module, "ROOM_S", 0.05)
    prompts.start(asking(encoder, "s", {B: "two", A: "one"}))
    assert await missing(prompts) == [B, A]
    assert prompts.count("embeddings_load_failed", error="StagingFull") == 1
    prompts.dispatcher.abort(["p", "r"])
    prompts.start(asking(encoder, "t", {A: "one", B: "two"}))
    await entered(prompts, "t")
    prompts.dispatcher.abort(["t"])
    assert (room._free, len(room._waiting)) == (2 * ROWS * FORM.row_bytes, 0)


@pytest.mark.parametrize("loss", ["abort", "stream", "later attempt"])
async def test_a_prompt_does_not_wait_for_an_encode_that_has_ended(encoder, prompts, loss):
    begun(encoder, "one")
    prompts.start(asking(encoder, "p", {A: "one"}))
    await until(lambda: encoder.dispatcher.outgoing.followers == 1, "it follows")
    if loss == "abort":
        encoder.dispatcher.abort(["one"])
    elif loss == "stream":
        encoder.dispatcher.disconnect(encoder.session)
    else:
        encoder.start(encoding("one", epoch=2))
    await prompts.fails(Failed.CODE_MEDIA, A)
    assert encoder.engine.aborted == ["one#1"]


async def test_a_late_encode(encoder, prompts, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.1)
    begun(encoder, "one")
    prompts.start(asking(encoder, "p", {A: "one"}))
    await prompts.fails(Failed.CODE_MEDIA, "in time")
    assert prompts.count("embeddings_load_failed", error="SourceTimeout") == 1


async def test_too_many_embeddings(encoder, prompts, monkeypatch):
    monkeypatch.setattr(module, "MOST_EMBEDDING_BYTES", ROWS * FORM.row_bytes)
    for image in (A, B):
        kept(encoder, image[:3], image)
    prompts.start(asking(encoder, "p", {A: "aaa", B: "bbb"}))
    assert (await prompts.failure()).code == Failed.CODE_MEDIA
    prompts.start(asking(encoder, "q", {A: "aaa"}))
    await entered(prompts, "q")


async def test_a_waiting_prompt_is_aborted(encoder, prompts):
    begun(encoder, "one")
    prompts.start(asking(encoder, "p", {A: "one"}))
    await until(lambda: encoder.dispatcher.outgoing.followers == 1, "it follows")
    prompts.dispatcher.abort(["p"])
    await until(lambda: encoder.dispatcher.outgoing.followers == 0, "it leaves")
    computed(encoder, "one", A)
    assert (prompts.dispatcher.requests, prompts.engine.submitted, prompts.failed()) == (0, [], [])


async def test_what_makes_no_sense_is_refused(encoder, prompts):
    stranger = asking(encoder, "stranger", {A: "one"})
    stranger.encoded[0].identifier = B
    twice = asking(encoder, "twice", {A: "one"})
    twice.encoded.append(twice.encoded[0])
    saved = asking(encoder, "saved", {A: "one"}, PHASE_SAVE)
    decoded = asking(encoder, "decoded", {A: "one"})
    decoded.source.CopyFrom(decoded.encoded[0].source)
    for start in (stranger, twice, saved, decoded, encoding("encode")):
        prompts.start(start)
        assert (await prompts.failure()).code == Failed.CODE_INVALID
    text = encoding("text")
    text.engine_request = wire.encode_request(request("text", prompt(ROWS)))
    longer = encoding("longer")
    core = request("longer", prompt(ROWS + 1))
    core.mm_features = [metadata_of(feature(0, ROWS))]
    longer.engine_request = wire.encode_request(core)
    for start in (text, longer, asking(encoder, "p", {A: ""}), asking(encoder, "p", {A: ""}, PHASE_PREFILL)):
        encoder.start(start)
        assert (await encoder.failure()).code == Failed.CODE_INVALID


async def test_a_wrong_key(encoder, prompts):
    kept(encoder, "one")
    start = asking(encoder, "p", {A: "one"})
    start.encoded[0].source.key = b"sixteen others ."
    prompts.start(start)
    await prompts.fails(Failed.CODE_MEDIA, A)
