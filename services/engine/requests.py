"""vLLM's Request from a router's Start, and the meaning of its end.

Nothing that a client can write steers the engine's transfers: `SamplingParams.extra_args` is cleaned of every
key that vLLM or we give a meaning, and ours are put in their place.

Leans on: vllm.v1.request.Request (from_engine_core_request, append_output_token_ids, max_tokens,
kv_transfer_params, prefill_stats, priority, skip_reading_prefix_cache, status, stop_reason,
get_finished_reason),
vllm.v1.core.sched.utils.check_stop, vllm.v1.engine.{EngineCoreRequest, FinishReason},
vllm.lora.request.LoRARequest (name, number, path),
vllm.sampling_params.SamplingParams (extra_args, prompt_logprobs, prompt_logprob_token_ids, max_tokens,
ignore_eos, detokenize).
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

from baton.attempts import attempt_id, prefix_id
from baton.handoff.params import LoadParams, load_params, save_params
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import (
    PHASE_DECODE,
    PHASE_LOAD,
    PHASE_PREFILL,
    PHASE_SAVE,
    Failed,
    ServiceClass,
    Start,
)
from baton.services.decode.step_share import Standing
from baton.services.engine import step_checks, wire
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.errors import RequestRefused
from baton.services.engine.patches import first_drafts
from baton.services.engine.patches.continuation import GENERATED_KEY, VOCABULARY_KEY
from baton.services.engine.step_checks import LOOSEST, StepLimits
from baton.services.prefill import fair_share

# Keys of extra_args with a meaning for vLLM or for us: none may come from outside.
_RESERVED = (
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_cache_report_mode",
    GENERATED_KEY,
    VOCABULARY_KEY,
)


@dataclass(frozen=True)
class EngineLimits:
    """The most that a loaded engine can take."""

    max_model_len: int  # tokens, prompt and output together
    vocabulary: int  # width of the logits
    block_hasher: Callable[[Request], list[Any]] | None
    steps: StepLimits = LOOSEST
    adapters: Sequence[AdapterFiles] = ()  # in the order in which the engine has numbered them, from 1


@dataclass
class Prepared:
    """A request as the engine gets it. `max_tokens` is the client's; the request's own may be cut."""

    request_id: str  # the router's; `request` has the engine's
    epoch: int
    request: Request
    max_tokens: int
    saves: bool  # its KV is wanted elsewhere after the prefill
    vocabulary: int  # EngineLimits'
    cut: bool = False  # tried alone, and ends after a few tokens


def prepare(start: Start, internal_id: str, client_index: int, limits: EngineLimits) -> Prepared:
    """Build the engine's request for one phase of one attempt.

    The tokens generated so far become output: penalties, min_tokens and max_tokens count them. A PREFILL is
    cut to one token more by the request's own max_tokens, so that SamplingParams still says what the
    client asked for. A SAVE is a PREFILL of the prompt's beginning, whose token nobody gets. Raises
    RequestRefused(INVALID) for what cannot be run here.
    """
    core = _decode(start)
    if start.alone_tokens and (start.phase != PHASE_DECODE or start.HasField("manifest")):
        raise _invalid(
            "a request tried alone computes its prompt itself: it must be a DECODE without a manifest"
        )
    generated = list(start.output_token_ids)
    _check(core, generated, limits)
    if start.phase == PHASE_LOAD:
        _check_early(core, limits)
    if start.phase == PHASE_SAVE:
        _cut(core, start.prefix_tokens)
        generated = []
    core.request_id = internal_id
    core.client_index = client_index
    core.current_wave = 0
    core.lora_request = _adapter(core.lora_request, limits.adapters)
    params = core.sampling_params
    params.extra_args = _clean(params.extra_args)
    if generated:
        _mark_generated(params, len(generated), limits.vocabulary)
    request = Request.from_engine_core_request(core, limits.block_hasher)
    prefills, brings = start.phase == PHASE_PREFILL, start.HasField("manifest")
    tokens = len(core.prompt_token_ids) - start.manifest.num_tokens if prefills else 0
    # Whatever a client asked for: requests that only decode keep the order in which they came.
    request.priority = fair_share.priority(
        time.monotonic(),
        max(0, tokens),
        handed_over=start.phase == PHASE_SAVE or (brings and not prefills),
        patience_ms=start.service.patience_ms,
    )
    if start.HasField("service"):
        request.standing = _standing(start.service)
    if generated:
        request.append_output_token_ids(generated)
        request.prefill_stats = None  # sent with its first token; a prefix hit beyond the prompt kills vLLM
    max_tokens = request.max_tokens
    cut = prefills or start.phase == PHASE_SAVE
    saves = cut and max_tokens > len(generated) + 1
    if cut:
        request.max_tokens = len(generated) + 1
    if start.alone_tokens:
        request.max_tokens = min(max_tokens, len(generated) + start.alone_tokens)
    load = _load(start) if brings else None
    if prefills and saves:
        first_drafts.want(request)
    if start.draft_token_ids:
        first_drafts.give(request, _drafts(start, limits.vocabulary))
    if saves:
        request.kv_transfer_params = save_params(start.epoch, cached=not prefills, prefix=load)
    else:
        request.kv_transfer_params = load
    ends_early = start.alone_tokens > 0
    return Prepared(start.request_id, start.epoch, request, max_tokens, saves, limits.vocabulary, ends_early)


def _standing(service: ServiceClass) -> Standing:
    return Standing(service.priority, service.share, service.itl_s, service.preemptible, service.ttft_s)


def resume(prepared: Prepared, start: Start) -> Callable[[], Manifest]:
    """Return what gives a request that loads early its first tokens, on the engine's thread.

    Raises RequestRefused(HANDOFF) where the DECODE's tokens do not continue those that the LOAD came with.
    """
    request = prepared.request
    before, generated = list(request.output_token_ids), list(start.output_token_ids)
    if generated[: len(before)] != before or len(generated) == len(before) or not start.HasField("manifest"):
        raise RequestRefused(
            Failed.CODE_HANDOFF,
            f"{len(generated)} tokens of output do not go on behind the {len(before)} of this load",
        )

    def give_tokens() -> Manifest:
        _mark_generated(request.sampling_params, len(generated), prepared.vocabulary)
        request.append_output_token_ids(generated[len(before) :])
        request.prefill_stats = None
        first_drafts.give(request, _drafts(start, prepared.vocabulary))
        return start.manifest

    return give_tokens


def _drafts(start: Start, vocabulary: int) -> list[int]:
    """Return the proposals that came along, up to the first that is no token."""
    return list(takewhile(lambda token: token < vocabulary, start.draft_token_ids))


def really_ended(prepared: Prepared, max_model_len: int) -> bool:
    """Return whether a request that was cut, like a PREFILL at its one token, would have ended there anyway.

    This runs vLLM's own check again with the client's max_tokens. If True, the request has the reason.
    """
    request = prepared.request
    request.max_tokens = prepared.max_tokens
    return bool(check_stop(request, max_model_len))


def finish_of(request: Request) -> tuple[FinishReason | None, int | str | None]:
    """Return the finish and stop reason of an ended request."""
    return request.get_finished_reason(), request.stop_reason


def _decode(start: Start) -> EngineCoreRequest:
    try:
        return wire.decode_request(start.engine_request)
    except ValueError as error:
        raise _invalid(str(error)) from None


def _check(core: EngineCoreRequest, generated: Sequence[int], limits: EngineLimits) -> None:
    if core.sampling_params is None or core.sampling_params.max_tokens is None:
        raise _invalid(
            "only text generation with a max_tokens is served; this request has no sampling parameters"
        )
    if not core.prompt_token_ids or core.prompt_embeds is not None:
        raise _invalid("a prompt of token ids is needed; prompt embeddings are not served")
    if core.mm_features:
        raise _invalid("images, audio and video are not served: only text is")
    if core.resumable:
        raise _invalid("streaming input is not served")
    if len(core.prompt_token_ids) + len(generated) >= limits.max_model_len:
        raise _invalid(
            f"prompt and output so far take {len(core.prompt_token_ids)} + {len(generated)} tokens; "
            f"this model's limit of {limits.max_model_len} leaves none to generate"
        )
    if len(generated) >= core.sampling_params.max_tokens:
        raise _invalid(
            f"the output is complete: it has {len(generated)} tokens, max_tokens is "
            f"{core.sampling_params.max_tokens}"
        )
    if problem := step_checks.problem(core.sampling_params, len(core.prompt_token_ids), limits.steps):
        raise _invalid(problem)
    highest = max(*core.prompt_token_ids, *generated, 0)
    if highest >= limits.vocabulary:
        raise _invalid(f"token id {highest} is outside the model's vocabulary of {limits.vocabulary}")


def _adapter(wanted: LoRARequest | None, adapters: Sequence[AdapterFiles]) -> LoRARequest | None:
    """Return the adapter by this engine's number for it.

    In the place of a path stands the fingerprint of its files: vLLM makes both name and path a part of the
    names of KV blocks, and paths may differ between machines. It reads no path of an adapter that it has.
    Raises RequestRefused(INVALID) for one that is not here, or has other files than the router's.
    """
    if wanted is None:
        return None
    for number, one in enumerate(adapters, start=1):
        if one.name == wanted.lora_name:
            if one.fingerprint == wanted.lora_path:
                return LoRARequest(one.name, number, one.fingerprint)
            raise _invalid(f"the files of the adapter {one.name!r} are others here than at the router")
    raise _invalid(f"this worker does not have the adapter {wanted.lora_name!r} (engine.lora)")


def _check_early(core: EngineCoreRequest, limits: EngineLimits) -> None:
    """Refuse to load early what depends on the first token from its begin on."""
    params = core.sampling_params
    of_prompt = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    if params.structured_outputs is not None or of_prompt:
        raise RequestRefused(Failed.CODE_HANDOFF, "grammars and prompt_logprobs are not loaded early")
    if params.skip_reading_prefix_cache:  # vLLM would load nothing, and generate a first token of its own
        raise RequestRefused(Failed.CODE_HANDOFF, "what must not use the prefix cache is not loaded early")
    if len(core.prompt_token_ids) + 1 >= limits.max_model_len:
        raise RequestRefused(Failed.CODE_HANDOFF, "the prompt's first token is its last")


def _cut(core: EngineCoreRequest, tokens: int) -> None:
    """Leave the prompt's first tokens alone, whose KV is to be saved: nothing else of the request matters."""
    if not 0 < tokens < len(core.prompt_token_ids):
        raise _invalid(f"{tokens} tokens are no beginning of a prompt of {len(core.prompt_token_ids)}")
    core.prompt_token_ids = core.prompt_token_ids[:tokens]
    # One token more than is generated: it never ends by itself, and so its KV is always wanted.
    core.sampling_params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)


def _load(start: Start) -> LoadParams:
    """Return the load of what the manifest describes: this request's KV, or the beginning of its prompt's."""
    if start.phase != PHASE_PREFILL:
        return load_params(start.epoch, start.manifest)
    saved_as = attempt_id(prefix_id(start.request_id), start.epoch)
    return load_params(start.epoch, start.manifest, saved_as)


def _clean(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    return {key: value for key, value in extra.items() if key not in _RESERVED} if extra else None


def _mark_generated(params: Any, count: int, vocabulary: int) -> None:
    params.extra_args = {**(params.extra_args or {}), GENERATED_KEY: count, VOCABULARY_KEY: vocabulary}
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        # Sent with the first token. Without them the prefix cache and a handoff may be used again.
        params.prompt_logprobs = None
        params.prompt_logprob_token_ids = None
        params.skip_reading_prefix_cache = False


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(Failed.CODE_INVALID, message)
