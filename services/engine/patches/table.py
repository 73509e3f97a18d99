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
    processes: str = RANKS
    platform: Literal["any", "CPU", "GPU"] = "any"
    runners: str = "V1"  # vLLM's model runners

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"{__package__}.{self.name}")

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(one.symbol for one in replacements(self.module))


@dataclass(frozen=True)
class ObjectPatch:
    """A patch of single objects, or for the time of one call, in the file that applies it."""

    file: str
    symbols: tuple[str, ...]
    until: str
    why: str = ""  # empty: the file's docstring says it
    processes: str = ROUTER


PATCHES = (
    Patch(
        name="continuation",
        processes=f"{CORE} and {RANKS}",
        until="vLLM takes a request with output tokens",
    ),
    Patch(
        name="kept_images",
        processes=CORE,
        until="vLLM sends V1's runner resumed requests whole",
    ),
    Patch(
        name="seeded_prompts",
        until="vLLM leaves these generators alone on a CPU",
        platform="CPU",
    ),
    Patch(
        name="cpu.expand_kernel",
        until="vLLM's _expand_kernel_impl copies its result back into `output`",
        platform="CPU",
    ),
    Patch(
        name="cpu.rotary",
        until="vLLM's CPU rotary_embedding takes [tokens, heads, size]",
        platform="CPU",
    ),
    Patch(
        name="cpu.punica",
        until="vLLM's torch_ops for LoRA skip tokens with index -1",
        platform="CPU",
    ),
    Patch(
        name="cpu.kernel_binding",
        until="vLLM's _rebind_kernels skips objects without a dictionary",
        platform="CPU",
    ),
    Patch(
        name="cpu.ngrams",
        until="vLLM's NgramProposer compiles at construction and restores the thread count",
        platform="CPU",
    ),
    Patch(
        name="cpu.gdn_conv",
        until="vLLM's CPU _spec_forward keeps `width - 2` inputs before any step's own",
        platform="CPU",
    ),
    Patch(
        name="cpu.mamba_drafts",
        until="vLLM's CPU functions use num_accepted_tokens",
        platform="CPU",
    ),
    Patch(
        name="cpu.unequal_gathers",
        until="vLLM's CpuCommunicator has all_gatherv and reduce_scatterv",
        platform="CPU",
    ),
    Patch(
        name="cpu.local_experts",
        until="vLLM's CPU experts use expert_map",
        platform="CPU",
    ),
    Patch(
        name="cpu.amx",
        processes=EVERYWHERE,
        until="vLLM calls torch.cpu._init_amx before it chooses AMX kernels",
        platform="CPU",
    ),
    Patch(
        name="cpu.inspection",
        processes=EVERYWHERE,
        until="vLLM inspects in-process on platforms without CUDA",
        platform="CPU",
    ),
    Patch(
        name="cpu.gloo",
        until="vLLM makes no process groups of one rank, or Gloo's threads stop polling",
        platform="CPU",
    ),
    Patch(
        name="cpu.uncompiled",
        until="vLLM runs both functions uncompiled on a CPU",
        platform="CPU",
    ),
    Patch(
        name="cpu.stage_buffers",
        until="vLLM's CPU worker makes the buffers without a warm-up",
        platform="CPU",
    ),
    Patch(
        name="cpu.ending",
        until="vLLM skips garbage collection when its process exits",
        platform="CPU",
    ),
    Patch(  # innermost, because it replaces vLLM's drafter
        name="idle_drafter",
        until="vLLM skips the drafter in such steps and catches up on its KV later",
        platform="CPU",
    ),
    Patch(
        name="drafts_v1",
        until="vLLM gives custom proposers the batch's tokens and lets them continue a drafter's tokens",
    ),
    Patch(
        name="drafts_v2",
        until="vLLM's V2 continues drafts with matches and takes drafts of different lengths",
        platform="GPU",
        runners="V2",
    ),
    Patch(  # around the patches that draft
        name="undrafted",
        until="seeds reproduce under speculation and vLLM's rejection sampler applies min_p and logit_bias",
        platform="CPU",
    ),
    Patch(
        name="verify_v1",
        until="vLLM lets a plug-in name its rejection sampler",
    ),
    Patch(
        name="verify_v2",
        until="vLLM lets a plug-in name its rejection sampler",
        platform="GPU",
        runners="V2",
    ),
    Patch(
        name="named_logprobs",
        until="vLLM's V1 gathers them per request, even with drafts",
    ),
    Patch(
        name="thinking_rows",
        until="vLLM's V1 keeps budgets by request and counts rows correctly in steps without drafts",
    ),
    Patch(
        name="accepted_states",
        until="vLLM keeps the number of accepted tokens with the request",
    ),
    Patch(  # outermost, so that our proposers' time counts as drafting
        name="step_times",
        processes=f"{CORE} and {RANKS}",
        until="vLLM's step outputs carry these times",
        runners="V1 and V2",
    ),
    Patch(
        name="held_tokens",
        processes=ROUTER,
        until="vLLM holds back the ids as well",
        runners="V1 and V2",
    ),
)

OBJECTS = (
    ObjectPatch(
        file="services/engine/patches/draft_length.py",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
            "vllm.v1.core.sched.scheduler:Scheduler",  # its attribute dynamic_sd_lookup
        ),
        processes=CORE,
        until="vLLM lets a plug-in choose the number",
    ),
    ObjectPatch(
        file="services/engine/patches/first_drafts.py",
        symbols=(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
            "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        ),
        processes=CORE,
        until="new requests can bring drafts, and KV connectors get those made at a prompt's end",
    ),
    ObjectPatch(
        file="services/engine/patches/giving_way.py",
        symbols=("vllm.v1.core.sched.scheduler:Scheduler.schedule",),
        processes=CORE,
        until="vLLM orders running requests by priority and bounds the share of lower ones",
    ),
    ObjectPatch(
        file="services/engine/patches/early_loads.py",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request",
        ),
        processes=CORE,
        until="vLLM preempts requests that wait for KV, or asks KV connectors before the prefix cache",
    ),
    ObjectPatch(
        file="services/engine/patches/failed_step.py",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "vllm.v1.engine.core:EngineCore.log_error_detail",
        ),
        processes=CORE,
        until="vLLM fails only the requests of that step",
    ),
    ObjectPatch(
        file="services/router/vllm/frontend.py",
        why="vLLM's front end gets our client of the workers instead of an engine: AsyncLLM takes no "
        "client, so its factory is replaced during one call.",
        symbols=("vllm.v1.engine.async_llm:EngineCoreClient",),
        until="vLLM's AsyncLLM takes a client",
    ),
    ObjectPatch(
        file="services/router/vllm/prepared_images.py",
        symbols=(
            "vllm.multimodal.processing.context:BaseProcessingInfo",  # its property model_id
            "vllm.multimodal.processing.processor:BaseMultiModalProcessor._cached_apply_hf_processor",
        ),
        until="vLLM names images by a model's content instead of its path, and bounds prepared images",
    ),
    ObjectPatch(
        file="services/router/vllm/grammar_checks.py",
        why="vLLM's front end parses grammars on its event loop, where some take gigabytes or crash. The "
        "router checks only the form; workers try the rest in a process that can be killed.",
        symbols=(
            "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
            "vllm.v1.structured_output.backend_guidance:validate_guidance_grammar",
            "vllm.v1.structured_output.backend_outlines:validate_structured_output_request_outlines",
            "vllm.v1.structured_output.backend_lm_format_enforcer:"
            "validate_structured_output_request_lm_format_enforcer",
            "vllm.sampling_params:_get_llg_tokenizer",
        ),
        until="vLLM checks grammars outside its event loop, within limits",
    ),
    ObjectPatch(
        file="services/engine/grammars/engine.py",
        symbols=("vllm.v1.structured_output:StructuredOutputManager._create_grammar",),
        processes=CORE,
        until="vLLM has a backend per request and clients take turns",
    ),
    ObjectPatch(
        file="services/router/vllm/request_limits.py",
        why="vLLM bounds neither prompts times n nor the size of a grammar; both are checked before "
        "anything is rendered.",
        symbols=("vllm.entrypoints.serve.engine.serving",),  # _check_model of the handlers made from it
        until="vLLM limits both",
    ),
    ObjectPatch(
        file="services/router/vllm/images.py",
        why="vLLM fetches and decodes clients' images in threads, without bounds. Its media connector, by "
        "its own registry, gets only images that the router has decoded in separate processes.",
        symbols=(
            "vllm.multimodal.media:MediaConnector.fetch_image_async",
            "vllm.multimodal.media:MediaConnector.load_from_url_async",
        ),
        until="vLLM decodes in processes that it can end",
    ),
    ObjectPatch(
        file="services/router/vllm/error_responses.py",
        why="Gives errors in streams the text, status and type of the router's refusals, and shortens errors "
        "that quote the request: vLLM searches them for paths in quadratic time, and returns them whole.",
        symbols=(
            "vllm.entrypoints.generate.base.serving:"
            "GenerateBaseServing._convert_generation_error_to_streaming_response",
            "vllm.entrypoints.serve.exception_handling.utils:sanitize_message",
        ),
        until="vLLM sends the error object itself, and bounds its text",
    ),
    ObjectPatch(
        file="services/router/vllm/endings.py",
        why="When max_tokens cuts an unstreamed chat answer after a tool call, vLLM reports tool_calls as if "
        "all calls were complete. It reports a cut response as completed, and a failing stream of Responses "
        "breaks off without an event.",
        symbols=(
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_stream_generator",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_full_generator",
        ),
        until="vLLM reports length as in streams, and streams response.incomplete and response.failed",
    ),
    ObjectPatch(
        file="services/router/vllm/messages.py",
        why="Anthropic's handler logs a traceback per refusal, cannot read an error in the stream that it "
        "converts, and parses the arguments of cut tool calls.",
        symbols=(
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages",
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.count_tokens",
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter",
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.messages_full_converter",
        ),
        until="vLLM's handler copes with these",
    ),
    ObjectPatch(
        file="services/router/vllm/response_store.py",
        why="vLLM stores responses forever, open to anybody who knows an id. A background response counts "
        "for no tenant, and its failure is lost.",
        symbols=(
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._run_background_request",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._run_background_request_stream",
            "vllm.entrypoints.openai.responses.serving:"
            "OpenAIServingResponses.responses_background_stream_generator",
        ),
        until="vLLM's store has owners and limits",
    ),
    ObjectPatch(
        file="services/router/vllm/quick_unions.py",
        why="pydantic tries all members of a union for every list item. Our validators try only those that "
        "match `type` or `role`, and stop at the first wrong item.",
        symbols=(
            "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
            "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        ),
        until="vLLM's unions have discriminators and its lists fail fast",
    ),
    ObjectPatch(
        file="services/router/vllm/tokenizing.py",
        why="vLLM tokenizes a whole text before it cuts it, at a second and 80 MiB per MiB. Here long texts "
        "are counted and tokenized in pieces where the ids stay the same.",
        symbols=("vllm.renderers.base:BaseRenderer._tokenize_prompt",),
        until="vLLM stops tokenizing at the model's length",
    ),
    ObjectPatch(
        file="services/router/vllm/large_answers.py",
        why="vLLM encodes thousands of log-probabilities in one go, while all streams wait. Here they are "
        "encoded a few at a time.",
        symbols=(
            "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse.model_dump",
            "vllm.entrypoints.openai.completion.protocol:CompletionResponse.model_dump",
            "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTextResponse.model_dump",
            "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensResponse.model_dump",
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs",
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
        ),
        until="vLLM makes large answers in pieces",
    ),
)


def install() -> None:
    """Apply the patches for this machine's platform, in the table's order; a second call does nothing.

    Raises StartError, which names the symbol, if vLLM's function differs.
    """
    from vllm.platforms import current_platform

    here = "CPU" if current_platform.is_cpu() else "GPU"
    for patch in PATCHES:
        if patch.platform in ("any", here):
            replace.install(patch.module)
