"""The engine's requests: how they wait for a source and continue, and which are refused."""

from dataclasses import replace

import pytest
from vllm.sampling_params import StructuredOutputsParams

from baton.handoff.params import LoadWish, SaveWish, wish_of
from baton.protos import worker_pb2 as pb
from baton.protos.handoff_pb2 import Manifest
from baton.services.engine import images, requests, wire
from baton.services.engine.errors import RequestRefused
from baton.services.engine.requests import EngineLimits
from tests.services.engine.test_images import feature, item
from tests.services.worker.router import request

PROMPT = list(range(8))
VOCABULARY, LENGTH = 100, 64
LIMITS = EngineLimits(LENGTH, VOCABULARY, None)
WRITTEN = [11, 12]


def start(phase=pb.PHASE_DECODE, written=(), tokens=None, **sampling):
    """Return a Start with a source. sampling: fields of its SamplingParams."""
    core = request("r", PROMPT, **{"max_tokens": 20, **sampling})
    saved = len(PROMPT) + len(written) if tokens is None else tokens
    return pb.Start(
        request_id="r",
        epoch=3,
        phase=phase,
        engine_request=wire.encode_request(core),
        output_token_ids=written,
        source=pb.Source(worker_id="p", request_id="r", key=b"k" * 16, tokens=saved),
    )


def complete(tokens, *written, drafts=()):
    manifest = Manifest(request_id="r#3", epoch=3, num_tokens=tokens)
    return pb.Complete(manifest=manifest, token_ids=written, draft_token_ids=drafts)


def prepare(one, word=None, limits=LIMITS):
    return requests.prepare(one, "r#3", 1, limits, word)


def refusal(one, word=None):
    with pytest.raises(RequestRefused) as refused:
        prepare(one, word)
    assert refused.value.code == pb.Failed.CODE_INVALID
    return str(refused.value)


@pytest.mark.parametrize("written", [[], WRITTEN])
def test_a_decode_waits_for_its_first_token_and_then_continues(written):
    made = prepare(start(written=written))
    saved = len(PROMPT) + len(written)
    assert not made.late
    assert list(made.request.output_token_ids) == written
    assert wish_of(made.request.kv_transfer_params) == LoadWish(3, saved, None)
    give = requests.resume(made, complete(saved, 42, drafts=[5, 6, VOCABULARY, 7]))
    assert list(made.request.output_token_ids) == written  # only the engine's thread changes it
    give()
    assert list(made.request.output_token_ids) == [*written, 42]
    assert made.request.first_drafts == (saved + 1, [5, 6])
    whole = prepare(start(written=written), complete(saved, 42, drafts=[5, 6]))
    assert list(whole.request.output_token_ids) == [*written, 42]
    assert whole.request.sampling_params.extra_args == made.request.sampling_params.extra_args
    assert whole.request.first_drafts == (saved + 1, [5, 6])
    assert wish_of(whole.request.kv_transfer_params) == LoadWish(3, saved, complete(saved).manifest)
    assert not whole.late


def test_a_prompts_beginning_is_loaded_by_the_name_of_its_save():
    one = start(pb.PHASE_PREFILL, tokens=5)
    one.source.request_id = "r/prefix"
    made = prepare(one, complete(5))
    manifest = complete(5).manifest
    assert wish_of(made.request.kv_transfer_params) == SaveWish(
        3, prefix=LoadWish(3, 5, manifest, "r/prefix#3")
    )
    assert list(made.request.output_token_ids) == []
    alone = prepare(one)  # the beginning came too late
    assert wish_of(alone.request.kv_transfer_params) == SaveWish(3)
    assert alone.request.priority >= made.request.priority
    assert not alone.late


LATE = [{"structured_outputs": StructuredOutputsParams(regex="a+")}, {"skip_reading_prefix_cache": True}]


@pytest.mark.parametrize("sampling", LATE, ids=lambda one: next(iter(one)))
def test_requests_that_need_their_first_token_are_late(sampling):
    assert prepare(start(**sampling)).late
    assert not prepare(start(**sampling), complete(len(PROMPT), 42)).late


def test_a_prompt_whose_first_token_may_be_its_last_is_late():
    for most, late in ((len(PROMPT) + 1, True), (len(PROMPT) + 2, False)):
        assert prepare(start(), limits=EngineLimits(most, VOCABULARY, None)).late == late
    written = prepare(start(written=WRITTEN), limits=EngineLimits(len(PROMPT) + 3, VOCABULARY, None))
    assert written.late


def test_prompt_logprobs_come_from_the_source_and_do_not_delay():
    asked = start(prompt_logprobs=2, skip_reading_prefix_cache=True)
    made = prepare(asked)
    assert not made.late
    assert made.request.sampling_params.prompt_logprobs is None
    asked.ClearField("source")
    assert prepare(asked).request.sampling_params.prompt_logprobs == 2


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (complete(8), "0 tokens"),
        (complete(8, *range(20)), "20 tokens from the source do not follow the 0"),
        (complete(8, VOCABULARY), f"token id {VOCABULARY} from the source is outside"),
    ],
)
def test_tokens_that_do_not_follow_are_refused(word, text):
    made = prepare(start())
    with pytest.raises(RequestRefused, match=text) as refused:
        requests.resume(made, word)
    assert refused.value.code == pb.Failed.CODE_HANDOFF
    assert made.request.num_output_tokens == 0


def test_tokens_are_given_once():
    made = prepare(start())
    requests.resume(made, complete(8, 42))()
    with pytest.raises(RequestRefused, match="do not follow"):
        requests.resume(made, complete(8, 42))


def test_a_source_with_another_number_of_tokens_is_refused():
    assert "saves the KV of 7 tokens; this attempt has 8" in refusal(start(tokens=7))
    assert "saves the KV of 8 tokens; this attempt has 10" in refusal(start(written=WRITTEN, tokens=8))


def test_an_answer_that_ends_with_its_first_token_has_nothing_to_decode():
    assert "its source gives one" in refusal(start(max_tokens=1))
    assert "output is complete" in refusal(start(max_tokens=1), complete(8, 42))


def test_a_request_tried_alone_has_no_source():
    one = start()
    one.alone_tokens = 2
    assert "without a source" in refusal(one)


KEPT = {"a": item(1.0), "b": item(2.0)}
SEEING = EngineLimits(LENGTH, VOCABULARY, None, find_image=KEPT.get, image_tokens=2)


def with_images(phase=pb.PHASE_PREFILL, *names, source=False):
    """Return a Start whose images have two tokens each, from token 1 on."""
    one = start(phase)
    core = wire.decode_request(one.engine_request)
    core.mm_features = [images.metadata_of(feature(1 + 2 * at, 2, name)) for at, name in enumerate(names)]
    one.engine_request = wire.encode_request(core)
    if not source:
        one.ClearField("source")
    return one


def pixels(made):
    return [one.data.get("pixel_values") for one in made.request.mm_features]


@pytest.mark.parametrize("phase", [pb.PHASE_PREFILL, pb.PHASE_DECODE])
def test_images_are_whole_where_the_prompt_is_computed(phase):
    made = prepare(with_images(phase, "a", "b", "a"), limits=SEEING)
    assert [one.data for one in made.request.mm_features] == [KEPT[name] for name in "aba"]


def test_images_are_metadata_where_the_kv_is_loaded():
    made = prepare(with_images(pb.PHASE_DECODE, "a", "c", source=True), limits=SEEING)
    assert pixels(made) == [None, None]
    assert [set(one.data) for one in made.request.mm_features] == [{"image_grid_thw"}] * 2


def test_a_saved_beginning_has_the_images_in_it():
    one = with_images(pb.PHASE_SAVE, "a", "b")
    one.prefix_tokens = 3
    made = prepare(one, limits=SEEING)
    assert [feature.identifier for feature in made.request.mm_features] == ["a"]
    assert None not in pixels(made)
    other = with_images(pb.PHASE_SAVE, "c", "b")
    other.prefix_tokens = 5
    assert [value is None for value in pixels(prepare(other, limits=SEEING))] == [True, False]
    one.prefix_tokens = 4
    with pytest.raises(RequestRefused, match="end within an image"):
        prepare(one, limits=SEEING)


@pytest.mark.parametrize(
    ("one", "limits", "code"),
    [
        (with_images(pb.PHASE_PREFILL, "a", "c"), SEEING, pb.Failed.CODE_MEDIA),
        (with_images(pb.PHASE_DECODE, "c"), SEEING, pb.Failed.CODE_MEDIA),
        (with_images(pb.PHASE_PREFILL, "a"), LIMITS, pb.Failed.CODE_DRAINING),  # takes no images
        (with_images(pb.PHASE_DECODE, "a", source=True), LIMITS, pb.Failed.CODE_DRAINING),
        (with_images(pb.PHASE_DECODE, "a"), replace(SEEING, image_tokens=1), pb.Failed.CODE_INVALID),
        (with_images(pb.PHASE_PREFILL, *"aaaa"), SEEING, pb.Failed.CODE_INVALID),  # beyond the prompt
    ],
)
def test_images_that_cannot_be_computed_are_refused(one, limits, code):
    with pytest.raises(RequestRefused) as refused:
        prepare(one, limits=limits)
    assert refused.value.code == code
