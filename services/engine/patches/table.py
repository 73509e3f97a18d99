"""The table of our patches of vLLM, in the order in which they are applied.

A row's module is imported only when the patch is applied, because vLLM and torch take seconds to import. If
two patches wrap the same function, the later one is called first. `deploy/setup/patches-docs` writes
docs/patches.md from this table and the modules' docstrings.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from baton.services.engine.patches import replace
from baton.services.engine.patches.replace import replacements

CORE, RANKS, ROUTER, EVERYWHERE = "core", "ranks", "router", "everywhere"


@dataclass(frozen=True)
class Patch:
    name: str  # its module in this package
    until: str  # what would make it unnecessary
    platform: Literal["any", "CPU", "GPU"] = "any"
    runners: str = "V1"  # vLLM's model runners
    processes: str = RANKS

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"{__package__}.{self.name}")

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(one.symbol for one in replacements(self.module))


@dataclass(frozen=True)
class ObjectPatch:
    """A patch of individual objects, or for the duration of one call; `file` applies it."""

    file: str
    until: str
    symbols: tuple[str, ...]
    why: str = ""  # empty: the file's docstring says why
    processes: str = ROUTER


PATCHES = (
    Patch("continuation", "vLLM takes a request with output tokens", processes=f"{CORE} and {RANKS}"),
    Patch("kept_images", "vLLM sends V1's runner resumed requests whole", processes=CORE),
    Patch("seeded_prompts", "vLLM leaves these generators alone on a CPU", "CPU"),
    Patch("cpu.expand_kernel", "vLLM's _expand_kernel_impl copies its result back into `output`", "CPU"),
    Patch("cpu.rotary", "vLLM's CPU rotary_embedding takes [tokens, heads, size]", "CPU"),
    Patch("cpu.punica", "vLLM's torch_ops for LoRA skip tokens with index -1", "CPU"),
    Patch("cpu.kernel_binding", "vLLM's _rebind_kernels skips objects without a dictionary", "CPU"),
    Patch("cpu.ngrams", "vLLM's NgramProposer compiles at construction and restores the thread count", "CPU"),
    Patch("cpu.gdn_conv", "vLLM's CPU _spec_forward keeps `width - 2` inputs before any step's own", "CPU"),
    Patch("cpu.mamba_drafts", "vLLM's CPU functions use num_accepted_tokens", "CPU"),
    Patch("cpu.unequal_gathers", "vLLM's CpuCommunicator has all_gatherv and reduce_scatterv", "CPU"),
    Patch("cpu.local_experts", "vLLM's CPU experts use expert_map", "CPU"),
    Patch(
        "cpu.amx", "vLLM calls torch.cpu._init_amx before it chooses AMX kernels", "CPU", processes=EVERYWHERE
    ),
    Patch(
        "cpu.inspection", "vLLM inspects in-process on platforms without CUDA", "CPU", processes=EVERYWHERE
    ),
    Patch("cpu.gloo", "vLLM makes no process groups of one rank, or Gloo's threads stop polling", "CPU"),
    Patch("cpu.uncompiled", "vLLM runs both functions uncompiled on a CPU", "CPU"),
    Patch("cpu.stage_buffers", "vLLM's CPU worker makes the buffers without a warm-up", "CPU"),
    Patch("cpu.ending", "vLLM skips garbage collection when its process exits", "CPU"),
    # innermost, because it replaces vLLM's drafter
    Patch("idle_drafter", "vLLM skips the drafter in such steps and catches up on its KV later", "CPU"),
    Patch(
        "drafts_v1",
        "vLLM gives custom proposers the batch's tokens and lets them continue a drafter's tokens",
    ),
    Patch(
        "drafts_v2",
        "vLLM's V2 continues drafts with matches and takes drafts of different lengths",
        "GPU",
        "V2",
    ),
    # around the patches that draft
    Patch(
        "undrafted",
        "seeds reproduce under speculation and vLLM's rejection sampler applies min_p and logit_bias",
        "CPU",
    ),
    Patch("verify_v1", "vLLM lets a plug-in name its rejection sampler"),
    Patch("verify_v2", "vLLM lets a plug-in name its rejection sampler", "GPU", "V2"),
    Patch("named_logprobs", "vLLM's V1 gathers them per request, even with drafts"),
    Patch(
        "thinking_rows",
        "vLLM's V1 keeps budgets by request and counts rows correctly in steps without drafts",
    ),
    Patch("accepted_states", "vLLM keeps the number of accepted tokens with the request"),
    # outermost, so that our proposers' time counts as drafting
    Patch("step_times", "vLLM's step outputs carry these times", "any", "V1 and V2", f"{CORE} and {RANKS}"),
    Patch("held_tokens", "vLLM holds back the ids as well", runners="V1 and V2", processes=ROUTER),
)

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
_CHAT = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"


def _of(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


OBJECTS = (
    ObjectPatch(
        "services/engine/patches/draft_length.py",
        "vLLM lets a plug-in choose the number",
        (*_of(_SCHEDULER, "update_from_output"), _SCHEDULER),  # its attribute dynamic_sd_lookup
        processes=CORE,
    ),
    ObjectPatch(
        "services/engine/patches/first_drafts.py",
        "new requests can bring drafts, and KV connectors get those made at a prompt's end",
        (
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            *_of(_SCHEDULER, "_update_after_schedule", "update_draft_token_ids"),
        ),
        processes=CORE,
    ),
    ObjectPatch(
        "services/engine/patches/giving_way.py",
        "vLLM orders running requests by priority and bounds the share of lower ones",
        _of(_SCHEDULER, "schedule"),
        processes=CORE,
    ),
    ObjectPatch(
        "services/engine/patches/early_loads.py",
        "vLLM preempts requests that wait for KV, or asks KV connectors before the prefix cache",
        _of(_SCHEDULER, "schedule", "_handle_blocked_waiting_request"),
        processes=CORE,
    ),
    ObjectPatch(
        "services/engine/patches/failed_step.py",
        "vLLM fails only the requests of that step",
        (*_of(_SCHEDULER, "schedule"), "vllm.v1.engine.core:EngineCore.log_error_detail"),
        processes=CORE,
    ),
    ObjectPatch(
        "services/router/vllm/frontend.py",
        "vLLM's AsyncLLM takes a client",
        ("vllm.v1.engine.async_llm:EngineCoreClient",),
        why="vLLM's front end gets our client of the workers instead of an engine: AsyncLLM takes no "
        "client, so its factory is replaced during one call.",
    ),
    ObjectPatch(
        "services/router/vllm/prepared_images.py",
        "vLLM names images by a model's content instead of its path, and bounds prepared images",
        (
            "vllm.multimodal.processing.context:BaseProcessingInfo",  # its property model_id
            "vllm.multimodal.processing.processor:BaseMultiModalProcessor._cached_apply_hf_processor",
        ),
    ),
    ObjectPatch(
        "services/router/vllm/request_limits.py",
        "vLLM checks grammars outside its event loop, within limits",
        (
            "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
            "vllm.v1.structured_output.backend_guidance:validate_guidance_grammar",
            "vllm.v1.structured_output.backend_outlines:validate_structured_output_request_outlines",
            "vllm.v1.structured_output.backend_lm_format_enforcer:validate_structured_output_request_lm_format_enforcer",
            "vllm.sampling_params:_get_llg_tokenizer",
        ),
        why="vLLM's front end parses grammars on its event loop, where some take gigabytes or crash. The "
        "router checks only the form; workers try the rest in a process that can be killed.",
    ),
    ObjectPatch(
        "services/engine/grammars/engine.py",
        "vLLM has a backend per request and clients take turns",
        ("vllm.v1.structured_output:StructuredOutputManager._create_grammar",),
        processes=CORE,
    ),
    ObjectPatch(
        "services/router/vllm/request_limits.py",
        "vLLM limits both",
        ("vllm.entrypoints.serve.engine.serving",),  # _check_model of the handlers made from it
        why="vLLM bounds neither prompts times n nor the size of a grammar; both are checked before "
        "anything is rendered.",
    ),
    ObjectPatch(
        "services/router/vllm/images.py",
        "vLLM decodes in processes that it can end",
        _of("vllm.multimodal.media:MediaConnector", "fetch_image_async", "load_from_url_async"),
        why="vLLM fetches and decodes clients' images in threads, without bounds. Its media connector, by "
        "its own registry, gets only images that the router has decoded in separate processes.",
    ),
    ObjectPatch(
        "services/router/vllm/error_responses.py",
        "vLLM sends the error object itself, and bounds its text",
        (
            "vllm.entrypoints.generate.base.serving:GenerateBaseServing._convert_generation_error_to_streaming_response",
            "vllm.entrypoints.serve.exception_handling.utils:sanitize_message",
        ),
        why="Gives errors in streams the text, status and type of the router's refusals, and shortens "
        "errors that quote the request: vLLM searches them for paths in quadratic time, and returns "
        "them whole.",
    ),
    ObjectPatch(
        "services/router/vllm/endings.py",
        "vLLM reports length as in streams, and streams response.incomplete and response.failed",
        (
            *_of(_CHAT, "chat_completion_full_generator"),
            *_of(_RESPONSES, "responses_stream_generator", "responses_full_generator"),
        ),
        why="When max_tokens cuts an unstreamed chat answer after a tool call, vLLM reports tool_calls as "
        "if all calls were complete. It reports a cut response as completed, and a failing stream of "
        "Responses breaks off without an event.",
    ),
    ObjectPatch(
        "services/router/vllm/messages.py",
        "vLLM's handler copes with these",
        _of(
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages",
            "create_messages",
            "count_tokens",
            "message_stream_converter",
            "messages_full_converter",
        ),
        why="Anthropic's handler logs a traceback per refusal, cannot read an error in the stream that it "
        "converts, and parses the arguments of cut tool calls.",
    ),
    ObjectPatch(
        "services/router/vllm/response_store.py",
        "vLLM's store has owners and limits",
        _of(
            _RESPONSES,
            "create_responses",
            "_run_background_request",
            "_run_background_request_stream",
            "responses_background_stream_generator",
        ),
        why="vLLM stores responses forever, open to anybody who knows an id. A background response counts "
        "for no tenant, and its failure is lost.",
    ),
    ObjectPatch(
        "services/router/vllm/quick_unions.py",
        "vLLM's unions have discriminators and its lists fail fast",
        (
            "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
            "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        ),
        why="pydantic tries all members of a union for every list item. Our validators try only those "
        "that match `type` or `role`, and stop at the first wrong item.",
    ),
    ObjectPatch(
        "services/router/vllm/tokenizing.py",
        "vLLM stops tokenizing at the model's length",
        ("vllm.renderers.base:BaseRenderer._tokenize_prompt",),
        why="vLLM tokenizes a whole text before it cuts it: a second and 80 MiB of memory for each MiB. "
        "Here long texts are counted and tokenized in pieces where the ids stay the same.",
    ),
    ObjectPatch(
        "services/router/vllm/large_answers.py",
        "vLLM makes large answers in pieces",
        (
            "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse.model_dump",
            "vllm.entrypoints.openai.completion.protocol:CompletionResponse.model_dump",
            "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTextResponse.model_dump",
            "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensResponse.model_dump",
            *_of(_CHAT, "_create_chat_logprobs", "chat_completion_full_generator"),
        ),
        why="vLLM encodes thousands of log-probabilities in one go, while all streams wait. Here they are "
        "encoded a few at a time.",
    ),
)


def install() -> None:
    """Apply this platform's patches in order, once. Raises StartError if a function of vLLM differs."""
    from vllm.platforms import current_platform

    here = "CPU" if current_platform.is_cpu() else "GPU"
    for patch in PATCHES:
        if patch.platform in ("any", here):
            replace.install(patch.module)
