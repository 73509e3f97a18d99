import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed
from baton.services.engine import wire
from baton.services.engine.images import MOST_BYTES, metadata_of
from baton.services.router.errors import NotAdmitted
from baton.services.router.images import Image, ImageBudget, Sent, budget_bytes
from baton.services.router.state import Journal
from harness.fake_worker import Fault, answer
from harness.router import Answer, engine_request
from tests.services.engine.test_images import item
from tests.services.router.asking import PROMPT
from tests.services.router.test_state import request_state

A, B = Image("a", b"a" * 100_000), Image("b", b"b" * 50_000)


def test_a_stream_forgets_what_its_worker_may_have_dropped():
    sent = Sent(limit=200_000)
    assert [sent.add(one) for one in (A, B, A)] == [True, True, False]
    assert sent.add(Image("c", b"c" * 100_000))  # B was used before A
    assert [sent.add(one) for one in (A, B)] == [False, True]
    sent.forget_all([A.identifier])
    assert sent.add(A)


def test_a_journal_counts_an_image_once():
    journal = Journal()
    one, two = request_state("one"), request_state("two")
    one.images, two.images = (A, B), (A,)
    journal.enter(one)
    journal.enter(two)
    assert (journal.size, journal.images.size) == (2 * one.journal_bytes, A.size + B.size)
    journal.enter(two)  # again
    journal.leave(one)
    journal.leave(one)
    assert journal.images.size == A.size
    journal.leave(two)
    assert (journal.size, journal.images.size) == (0, 0)


def test_images_leave_text_its_room():
    journal = Journal(images=ImageBudget(A.size))
    one, two, text = map(request_state, ("one", "two", "text"))
    one.images, two.images = (A,), (A, B)
    journal.enter(one)
    for _ in range(2):
        with pytest.raises(NotAdmitted, match=r"no room for more images.* 0\.1 MiB") as full:
            journal.enter(two)
    assert (full.value.status, full.value.retry_after_s) == (503, 1.0)
    journal.enter(text)
    assert len(journal) == 2
    journal.leave(one)
    assert journal.images.size == 0


def test_a_tenant_holds_half_of_the_room_for_images():
    budget = ImageBudget(2 * A.size)
    budget.enter((A, A), "tenant")
    with pytest.raises(NotAdmitted, match="MiB are yours"):
        budget.enter((B,), "tenant")
    budget.enter((A, B), "")  # nobody in particular
    budget.leave((A, A), "tenant")
    assert budget.size == A.size + B.size
    budget.enter((B,), "tenant")
    budget.leave((A, B), "")
    budget.leave((B,), "tenant")
    assert budget.size == 0
    assert (budget_bytes(1), budget_bytes(64)) == (4 * MOST_BYTES, 2 * MOST_BYTES)


def feature(name, offset):
    return MultiModalFeatureSpec(item(), "image", name, PlaceholderRange(offset, 4), name)


async def send(cluster, *features, prompt=PROMPT):
    name = f"q{len(cluster.got)}"
    cluster.got[name] = Answer()
    request = engine_request(name, prompt, 8)
    request.mm_features = list(features)
    await cluster.client.add_request_async(request)
    return name


async def ask(cluster, *features, prompt=PROMPT):
    found = await cluster.answer(await send(cluster, *features, prompt=prompt))
    assert (found.error, found.tokens) == (None, answer(prompt, 8))


def sent(worker):
    """Return the images that a worker got, each whole."""
    assert all(one.last for one in worker.seen.media)
    assert all(wire.decode_item(bytearray(one.part)) == item() for one in worker.seen.media)
    return [one.identifier for one in worker.seen.media]


async def test_an_image_goes_once_to_the_worker_that_computes_it(cluster):
    prefill, decode = await cluster.pair()
    first, second = feature("a", 0), feature("b", 5)
    for features in ([first], [first, second]):
        await ask(cluster, *features)
    assert (sent(prefill), sent(decode)) == (["a", "b"], [])
    size = sum(len(one.part) for one in prefill.seen.media)
    assert cluster.count("image_bytes_total", role="prefill") == size
    for worker in (prefill, decode):
        told = wire.decode_request(worker.seen.starts[-1].engine_request).mm_features
        assert told == [metadata_of(first), metadata_of(second)]


async def test_a_worker_that_lost_an_image_gets_it_again(cluster):
    prefill, decode = await cluster.pair()
    cluster.remake(max_attempts=1)
    await ask(cluster, feature("a", 0))
    prefill.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_MEDIA))
    await ask(cluster, feature("a", 0))
    assert (sent(prefill), sent(decode)) == (["a", "a"], [])


async def test_a_decode_worker_that_needs_an_image_computes_the_prompt(cluster):
    prefill, decode = await cluster.pair()
    cluster.remake(max_attempts=1)
    decode.faults.append(Fault(PHASE_DECODE, after_tokens=3, failed=Failed.CODE_MEDIA))
    await ask(cluster, feature("a", 0))
    assert (sent(prefill), sent(decode)) == (["a"], ["a"])
    assert [one.HasField("source") for one in decode.seen.starts] == [True, False]
    assert len(decode.seen.starts[1].output_token_ids) == 4


async def test_a_worker_that_always_lacks_an_image_ends_the_request(cluster):
    prefill, _ = await cluster.pair()
    prefill.faults.extend(Fault(PHASE_PREFILL, failed=Failed.CODE_MEDIA) for _ in range(9))
    found = await cluster.answer(await send(cluster, feature("a", 0)))
    assert "right after it was sent" in str(found.error)
    assert sent(prefill) == ["a"] * 3
