"""Build vLLM's Request from a router's Start, and interpret the request's end.

A client cannot control the engine's transfers: every key of `SamplingParams.extra_args` that means something
to vLLM or to us is removed before ours are added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.request import Request

from baton.attempts import attempt_id
from baton.handoff.params import KEY, Params, load_params, save_params
from baton.handoff.vllm.ec_connector import EMBEDDINGS
from baton.protos.worker_pb2 import (
    PHASE_DECODE,
    PHASE_ENCODE,
    PHASE_PREFILL,
    PHASE_SAVE,
    Complete,
    Failed,
    ServiceClass,
    Start,
)
from baton.services.decode.step_share import Standing
from baton.services.engine import images, step_checks, wire
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.errors import RequestRefused
from baton.services.engine.images import FindImage
from baton.services.engine.patches import first_drafts
from baton.services.engine.patches.continuation import GENERATED_KEY, VOCABULARY_KEY
from baton.services.engine.step_checks import LOOSEST, StepLimits
from baton.services.prefill import fair_share

# Keys of extra_args that clients must not set.
_RESERVED = (
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_cache_report_mode",
    GENERATED_KEY,
    VOCABULARY_KEY,
)


@dataclass(frozen=True)
class EngineLimits:
    max_model_len: int  # tokens of prompt and output together
    vocabulary: int  # width of the logits
    block_hasher: Callable[[Request], list[Any]] | None
    steps: StepLimits = LOOSEST
    adapters: Sequence[AdapterFiles] = ()  # the engine numbers them in this order, from 1
    find_image: FindImage | None = None  # None: the engine takes no images
    image_tokens: int = 0  # the largest image; an engine would never compute a larger one


@dataclass
class Prepared:
    request_id: str  # the router's id; `request` has the engine's id
    epoch: int
    request: Request
    max_tokens: int  # the client's limit; that of `request` may be smaller
    saves: bool  # whether another worker wants its KV after the prefill
    vocabulary: int  # see EngineLimits
    cut: bool = False  # whether the request is tried alone and ends after a few tokens
    late: bool = False  # whether the request must be prepared again once its first token is known


def prepare(
    start: Start, internal_id: str, client_index: int, limits: EngineLimits, complete: Complete | None = None
) -> Prepared:
    """Build the engine's request for one phase of one attempt. Raises RequestRefused(INVALID).

    The tokens generated so far become output, so that penalties, min_tokens and max_tokens count them. A
    PREFILL is cut to one more token by the max_tokens of its Request, while its SamplingParams keep the
    client's value. A SAVE is a PREFILL of the prompt's prefix, whose token is dropped. Images are put in
    only where the prompt is computed; elsewhere they stay metadata. Raises RequestRefused(MEDIA) for a
    missing image, except for a SAVE whose last block contains none.

    complete: the source's message at the end of its prompt. Without it a DECODE with a source reserves room
    for its KV and waits for its first token, and a PREFILL computes its whole prompt.
    """
    core = _decode(start)
    decodes, follows = start.phase == PHASE_DECODE, start.HasField("source")
    if start.alone_tokens and (follows or not decodes):
        raise _invalid("a request tried alone must be a DECODE without a source: it computes its prompt")
    waits = decodes and follows and complete is None
    generated = list(start.output_token_ids)
    if decodes and complete is not None:
        generated += complete.token_ids
    _check(core, generated, limits, more=waits)
    if decodes and follows:
        saved, here = start.source.tokens, len(core.prompt_token_ids) + len(start.output_token_ids)
        if saved != here:
            raise _invalid(f"the source saves the KV of {saved} tokens; this attempt has {here}")
        _clear_prompt_logprobs(core.sampling_params)  # the source sends them with the first token
    if start.phase == PHASE_SAVE:
        _cut(core, start.prefix_tokens)
        generated = []
    if core.mm_features and not (decodes and follows):
        needed = start.phase != PHASE_SAVE
        core.mm_features = _with_images(core.mm_features, limits.find_image, all_needed=needed)
    request = _request(core, generated, internal_id, client_index, limits)
    if start.encoded and (find := limits.find_image) is not None:
        setattr(request, EMBEDDINGS, {one.identifier: find(one.identifier) for one in start.encoded})
    request.priority = _priority(start, len(core.prompt_token_ids), complete)
    if start.HasField("service"):
        request.standing = _standing(start.service)
    late = waits and _is_late(request, limits)
    max_tokens, cut = request.max_tokens, start.phase in (PHASE_PREFILL, PHASE_SAVE)
    saves = cut and max_tokens > len(generated) + 1
    if cut:
        request.max_tokens = len(generated) + 1
    if start.alone_tokens:
        request.max_tokens = min(max_tokens, len(generated) + start.alone_tokens)
    loads = follows and (decodes or complete is not None)
    load = _load(start, internal_id, complete) if loads else None
    cached = start.phase == PHASE_SAVE
    request.kv_transfer_params = save_params(start.epoch, cached=cached, prefix=load) if saves else load
    if start.phase == PHASE_PREFILL and saves:
        first_drafts.want(request)
    if decodes and complete is not None:
        first_drafts.give(request, _drafts(complete, limits.vocabulary))
    ids = start.request_id, start.epoch
    alone = start.alone_tokens > 0
    return Prepared(*ids, request, max_tokens, saves, limits.vocabulary, cut=alone, late=late)


def prepare_encode(start: Start, internal_id: str, client_index: int, limits: EngineLimits) -> Prepared:
    """Build the request that computes one image, still with metadata only. Raises RequestRefused(INVALID)."""
    core = _decode(start)
    # nothing is sampled: vLLM ends the request after the prompt
    core.sampling_params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    core.lora_request = core.cache_salt = None
    _check(core, [], limits, more=False)
    places = [(one.mm_position.offset, one.mm_position.length) for one in core.mm_features or ()]
    if places != [(0, len(core.prompt_token_ids))]:
        raise _invalid("the prompt of an ENCODE is one image's tokens")
    request = _request(core, [], internal_id, client_index, limits)
    request.priority = _priority(start, len(core.prompt_token_ids), None)
    if start.HasField("service"):
        request.standing = _standing(start.service)
    return Prepared(start.request_id, start.epoch, request, 1, saves=False, vocabulary=limits.vocabulary)


def image_of(prepared: Prepared) -> tuple[str, int]:
    [feature] = prepared.request.mm_features
    return feature.identifier, feature.mm_position.get_num_embeds()


def add_image(prepared: Prepared, find: FindImage | None) -> None:
    """Put in the image of an ENCODE. Raises RequestRefused(MEDIA)."""
    prepared.request.mm_features = _with_images(prepared.request.mm_features, find, all_needed=True)


def images_of(start: Start) -> dict[str, int]:
    """Return the number of embeddings of each image, by its name. Raises RequestRefused(INVALID)."""
    core = _decode(start)
    features = core.mm_features or ()
    if problem := images.problem(features, len(core.prompt_token_ids or ())):
        raise _invalid(problem)
    return {one.identifier: one.mm_position.get_num_embeds() for one in features}


def _request(
    core: EngineCoreRequest,
    generated: Sequence[int],
    internal_id: str,
    client_index: int,
    limits: EngineLimits,
) -> Request:
    core.request_id = internal_id
    core.client_index = client_index
    core.current_wave = 0
    core.lora_request = _adapter(core.lora_request, limits.adapters)
    params = core.sampling_params
    if extra := params.extra_args:
        params.extra_args = {key: value for key, value in extra.items() if key not in _RESERVED}
    if generated:
        _mark_generated(params, len(generated), limits.vocabulary)
    request = Request.from_engine_core_request(core, limits.block_hasher)
    if generated:
        request.append_output_token_ids(list(generated))
        # The stats went out with the first token, and vLLM fails on a cache hit beyond the prompt.
        request.prefill_stats = None
    return request


def _priority(start: Start, prompt: int, complete: Complete | None) -> int:
    """Return the priority in the queue; requests that only decode keep their order of arrival."""
    prefills = start.phase in (PHASE_PREFILL, PHASE_ENCODE)
    loaded = start.source.tokens if complete is not None else 0
    return fair_share.priority(
        time.monotonic(),
        max(0, prompt - loaded) if prefills else 0,
        handed_over=start.phase == PHASE_SAVE or (start.HasField("source") and not prefills),
        patience_ms=start.service.patience_ms,
    )


def _standing(service: ServiceClass) -> Standing:
    return Standing(service.priority, service.share, service.itl_s, service.preemptible, service.ttft_s)


def resume(prepared: Prepared, complete: Complete) -> Callable[[], None]:
    """Return a function that gives a waiting request its first tokens. Raises RequestRefused(HANDOFF)."""
    request, tokens = prepared.request, list(complete.token_ids)
    before = request.num_output_tokens
    has_come = request.num_tokens > request.kv_transfer_params[KEY].tokens
    if not tokens or has_come or before + len(tokens) >= request.max_tokens:
        raise RequestRefused(
            Failed.CODE_HANDOFF,
            f"{len(tokens)} tokens from the source do not follow the {before} of this attempt, which may "
            f"have {request.max_tokens}",
        )
    if max(tokens) >= prepared.vocabulary:
        raise RequestRefused(
            Failed.CODE_HANDOFF,
            f"token id {max(tokens)} from the source is outside the vocabulary of {prepared.vocabulary}",
        )

    def give_tokens() -> None:
        _mark_generated(request.sampling_params, before + len(tokens), prepared.vocabulary)
        request.append_output_token_ids(tokens)
        request.prefill_stats = None
        first_drafts.give(request, _drafts(complete, prepared.vocabulary))

    return give_tokens


def _drafts(complete: Complete, vocabulary: int) -> list[int]:
    return list(takewhile(lambda token: token < vocabulary, complete.draft_token_ids))


def really_ended(prepared: Prepared, max_model_len: int) -> bool:
    """Return whether a request would have ended without the cut. vLLM's check also sets the finish reason."""
    request = prepared.request
    request.max_tokens = prepared.max_tokens
    return bool(check_stop(request, max_model_len))


def finish_of(request: Request) -> tuple[FinishReason | None, int | str | None]:
    return request.get_finished_reason(), request.stop_reason


def _decode(start: Start) -> EngineCoreRequest:
    try:
        return wire.decode_request(start.engine_request)
    except ValueError as error:
        raise _invalid(str(error)) from None


def _check(core: EngineCoreRequest, generated: Sequence[int], limits: EngineLimits, *, more: bool) -> None:
    """Refuse what cannot be run. more: whether the source's token will precede this worker's first."""
    if core.sampling_params is None or core.sampling_params.max_tokens is None:
        raise _invalid(
            "only text generation with a max_tokens is served; this request has no sampling parameters"
        )
    if not core.prompt_token_ids or core.prompt_embeds is not None:
        raise _invalid("a prompt of token ids is needed; prompt embeddings are not served")
    if core.mm_features:
        problem = images.problem(core.mm_features, len(core.prompt_token_ids))
        if problem:
            raise _invalid(problem)
        if limits.find_image is None:  # others may serve it: CODE_INVALID would end the request
            raise RequestRefused(Failed.CODE_DRAINING, "this worker serves no images: language_model_only")
        largest = max(one.mm_position.get_num_embeds() for one in core.mm_features)
        if largest > limits.image_tokens:
            raise _invalid(
                f"an image takes {largest} tokens; this engine has room for {limits.image_tokens} "
                "(engine.max_num_batched_tokens)"
            )
    if core.resumable:
        raise _invalid("streaming input is not served")
    if len(core.prompt_token_ids) + len(generated) >= limits.max_model_len:
        raise _invalid(
            f"prompt and output so far have {len(core.prompt_token_ids)} + {len(generated)} tokens; "
            f"this model's limit of {limits.max_model_len} leaves none to generate"
        )
    if len(generated) + more >= core.sampling_params.max_tokens:
        raise _invalid(
            f"the output is complete: it has {len(generated)} tokens{' and its source gives one' * more}, "
            f"max_tokens is {core.sampling_params.max_tokens}"
        )
    if problem := step_checks.problem(core.sampling_params, len(core.prompt_token_ids), limits.steps):
        raise _invalid(problem)
    highest = max(*core.prompt_token_ids, *generated, 0)
    if highest >= limits.vocabulary:
        raise _invalid(f"token id {highest} is outside the model's vocabulary of {limits.vocabulary}")


def _adapter(wanted: LoRARequest | None, adapters: Sequence[AdapterFiles]) -> LoRARequest | None:
    """Return the adapter with this engine's number for it, and with its fingerprint as the path.

    vLLM includes an adapter's name and path in the hashes of KV blocks, and paths may differ between
    machines. It does not read the path of a loaded adapter. Raises RequestRefused(INVALID) for an adapter
    that is missing here or differs from the router's.
    """
    if wanted is None:
        return None
    for number, one in enumerate(adapters, start=1):
        if one.name == wanted.lora_name:
            if one.fingerprint == wanted.lora_path:
                return LoRARequest(one.name, number, one.fingerprint)
            raise _invalid(f"the files of the adapter {one.name!r} differ between this worker and the router")
    raise _invalid(f"this worker does not have the adapter {wanted.lora_name!r} (engine.lora)")


def _is_late(request: Request, limits: EngineLimits) -> bool:
    """Return whether a request cannot be built before its first token is known: vLLM would load no KV."""
    return (
        request.structured_output_request is not None
        or request.skip_reading_prefix_cache
        or request.num_tokens + 1 >= limits.max_model_len
    )


def _cut(core: EngineCoreRequest, tokens: int) -> None:
    if not 0 < tokens < len(core.prompt_token_ids):
        raise _invalid(f"cannot save the first {tokens} of {len(core.prompt_token_ids)} prompt tokens")
    core.prompt_token_ids = core.prompt_token_ids[:tokens]
    if core.mm_features:
        core.mm_features = images.before(core.mm_features, tokens)
        if core.mm_features is None:
            raise _invalid(f"the first {tokens} tokens end within an image, which cannot be saved")
    # max_tokens is one more than is generated, so the request never ends by itself: its KV is always saved.
    core.sampling_params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)


def _with_images(features: Sequence[Any], find: FindImage | None, *, all_needed: bool) -> list[Any]:
    found, missing = images.whole(features, find or (lambda _: None))
    if missing and all_needed:
        raise RequestRefused(Failed.CODE_MEDIA, f"the image {missing} is not here")
    return found


def _load(start: Start, internal_id: str, complete: Complete | None) -> Params:
    source, manifest = start.source, complete.manifest if complete is not None else None
    saved_as = attempt_id(source.request_id, start.epoch)
    return load_params(start.epoch, source.tokens, manifest, saved_as if saved_as != internal_id else "")


def _mark_generated(params: Any, count: int, vocabulary: int) -> None:
    params.extra_args = {**(params.extra_args or {}), GENERATED_KEY: count, VOCABULARY_KEY: vocabulary}
    _clear_prompt_logprobs(params)


def _clear_prompt_logprobs(params: Any) -> None:
    """Drop prompt log-probabilities: they went out with the first token, and rule out the prefix cache."""
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        params.prompt_logprobs = None
        params.prompt_logprob_token_ids = None
        params.skip_reading_prefix_cache = False


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(Failed.CODE_INVALID, message)
