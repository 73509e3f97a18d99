"""The table of our patches of vLLM, in the order in which they are applied.

A row's module is imported only when the patch is applied: vLLM and torch take seconds to import. Where two
patches wrap the same function, the later one is called first.
`python -m baton.services.engine.patches.table > docs/patches.md` writes the page.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

CORE, RANKS, ROUTER, EVERYWHERE = "core", "ranks", "router", "everywhere"


@dataclass(frozen=True)
class Patch:
    """One patch of vLLM."""

    name: str  # its module in this package
    why: str
    symbols: tuple[str, ...]  # MODULE:ATTRIBUTE, or a module of vLLM's that it makes importable
    until: str  # what would make it unnecessary
    processes: str = RANKS
    platform: Literal["any", "CPU", "GPU"] = "any"
    runners: str = "V1"  # vLLM's model runners

    def install(self) -> None:
        """Apply it in this process; a second call does nothing. Raises StartError for another vLLM."""
        importlib.import_module(f"{__package__}.{self.name}").install()


@dataclass(frozen=True)
class ObjectPatch:
    """A patch of single objects of vLLM's, in the file that makes them."""

    file: str
    why: str
    symbols: tuple[str, ...]
    until: str
    processes: str = ROUTER


_V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu"

PATCHES = (
    Patch(
        name="continuation",
        why="A continued request must count its tokens so far as output, but vLLM takes new requests as "
        "prompts. V1's runner gets both and splits them; seeded generators and grammars are advanced.",
        symbols=(
            "vllm.v1.core.sched.output:NewRequestData.from_request",
            "vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__",
            "vllm.v1.structured_output:StructuredOutputManager._create_grammar",
        ),
        processes=f"{CORE} and {RANKS}",
        until="vLLM takes a request with output tokens",
        runners="V1; the grammar also V2",
    ),
    Patch(
        name="seeded_prompts",
        why="A seeded request whose prompt takes several steps kills the engine: vLLM rewinds the generator "
        "after each partial step, and a CPU generator has no offset.",
        symbols=(f"{_V1_RUNNER}.sample_tokens",),
        until="vLLM leaves these generators alone on a CPU",
        platform="CPU",
    ),
    Patch(
        name="cpu.expand_kernel",
        why="Temperature, top-k and top-p of requests with drafts go into a copy that is lost unless they "
        "are int64, so drafts are verified against uninitialised memory.",
        symbols=("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
        until="vLLM's _expand_kernel_impl copies its result back into `output`",
        platform="CPU",
    ),
    Patch(
        name="cpu.rotary",
        why="DeepSeek's query [tokens, heads, size] is taken for [batch, tokens, size], so heads are "
        "rotated by other tokens' positions.",
        symbols=("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",),
        until="vLLM's CPU rotary_embedding takes [tokens, heads, size]",
        platform="CPU",
    ),
    Patch(
        name="cpu.punica",
        why="A token without an adapter gets the device's last adapter when a batch mixes both kinds, "
        "and matrices are gathered per token.",
        symbols=("vllm.platforms.cpu:CpuPlatform.get_punica_wrapper",),
        until="vLLM's torch_ops for LoRA skip tokens with index -1",
        platform="CPU",
    ),
    Patch(
        name="cpu.kernel_binding",
        why="The search of every module's objects for kernels takes 0.3 s and fails on llvmlite, so no "
        "engine starts if numba was imported first.",
        symbols=("vllm.triton_utils.dispatcher:_rebind_kernels",),
        until="vLLM's _rebind_kernels skips objects without a dictionary",
        platform="CPU",
    ),
    Patch(
        name="cpu.ngrams",
        why="The warm-up of the n-gram search compiles nothing, so the first request stalls the engine for "
        "seconds. numba also resets OpenMP to all cores: on one core operators become 30 times slower.",
        symbols=("vllm.v1.spec_decode.ngram_proposer:NgramProposer.__init__",),
        until="vLLM's NgramProposer compiles at construction and restores the thread count",
        platform="CPU",
    ),
    Patch(
        name="cpu.gdn_conv",
        why="After a step with fewer drafts than the maximum, Gated DeltaNet's convolution reads inputs "
        "that are too old: answers are wrong, and a short step can end the engine.",
        symbols=("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",),
        until="vLLM's CPU _spec_forward keeps `width - 2` inputs before any step's own",
        platform="CPU",
    ),
    Patch(
        name="cpu.mamba_drafts",
        why="Mamba-2's CPU functions take one token per request and ignore how many drafts were accepted, "
        "so answers with drafts are wrong.",
        symbols=(
            "vllm.model_executor.layers.mamba.mamba_mixer2:causal_conv1d_update",
            "vllm.model_executor.layers.mamba.mamba_mixer2:selective_state_update",
        ),
        until="vLLM's CPU functions heed num_accepted_tokens",
        platform="CPU",
    ),
    Patch(
        name="cpu.unequal_gathers",
        why="The communicator of CPUs lacks the gathers and scatters of unequal parts that data-parallel "
        "mixtures of experts need.",
        symbols=(
            "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.all_gatherv",
            "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.reduce_scatterv",
        ),
        until="vLLM's CpuCommunicator has all_gatherv and reduce_scatterv",
        platform="CPU",
    ),
    Patch(
        name="cpu.local_experts",
        why="With expert parallelism the CPU kernel takes experts' global numbers for its own, and crashes.",
        symbols=("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",),
        until="vLLM's CPU experts heed expert_map",
        platform="CPU",
    ),
    Patch(
        name="cpu.amx",
        why="A process must ask the kernel for AMX tiles, and vLLM leaves that to oneDNN's first large "
        "product. A small bfloat16 model has none and dies of SIGILL.",
        symbols=("torch.cpu:_is_amx_tile_supported",),
        processes=EVERYWHERE,
        until="vLLM calls torch.cpu._init_amx before it chooses AMX kernels",
        platform="CPU",
    ),
    Patch(
        name="cpu.inspection",
        why="vLLM inspects a model's class in a subprocess to keep CUDA untouched: ten seconds of a core "
        "per class and process at a model's first start.",
        symbols=("vllm.model_executor.models.registry:_run_in_subprocess",),
        processes=EVERYWHERE,
        until="vLLM inspects in-process on platforms without CUDA",
        platform="CPU",
    ),
    Patch(
        name="cpu.gloo",
        why="Each of an engine's 13 process groups polls a hundred times a second, even groups of one rank: "
        "half of an idle engine's load.",
        symbols=("torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",),
        until="vLLM makes no groups of one rank, or Gloo's threads block",
        platform="CPU",
    ),
    Patch(
        name="cpu.uncompiled",
        why="torch.compile runs at the first request for log-probabilities and in the first step of each of "
        "several ranks, and stalls all streams for seconds.",
        symbols=(
            "vllm.v1.sample.sampler:batched_count_greater_than",
            "vllm.model_executor.layers.vocab_parallel_embedding:get_masked_input_and_mask",
        ),
        until="vLLM runs both functions uncompiled on a CPU",
        platform="CPU",
    ),
    Patch(
        name="cpu.ending",
        why="Shutting an engine down frees the model and collects garbage for 1.3 s of a core, in a process "
        "that is about to exit.",
        symbols=(f"{_V1_RUNNER}.shutdown",),
        until="vLLM collects nothing in an exiting process",
        platform="CPU",
    ),
    Patch(
        name="torchvision",
        why="vLLM's Qwen3.5 imports torchvision even for text-only models, and it cannot be installed "
        "beside a CPU torch. Empty modules stand in for it.",
        symbols=("vllm.model_executor.models.qwen3_5",),
        processes=EVERYWHERE,
        until="vLLM's Qwen3.5 imports without torchvision",
        runners="V1 and V2",
    ),
    Patch(
        name="idle_drafter",
        why="A step without drafts still runs the drafter and the rejection sampler, 40 % slower than "
        "without speculation on the demo model. Here the drafter catches up later, over several steps "
        "at once. Innermost, because it replaces vLLM's drafter.",
        symbols=(f"{_V1_RUNNER}._prepare_inputs", f"{_V1_RUNNER}.propose_draft_token_ids"),
        until="vLLM skips the drafter in such steps and catches up on its KV later",
        platform="CPU",
    ),
    Patch(
        name="drafts_v1",
        why="Our proposers draft from tokens alone or continue vLLM's drafts: they call vLLM's "
        "propose_draft_token_ids for as many tokens as they want, or not at all.",
        symbols=(
            f"{_V1_RUNNER}.__init__",
            f"{_V1_RUNNER}._update_states",
            f"{_V1_RUNNER}.propose_draft_token_ids",
        ),
        until="vLLM gives custom proposers the batch's tokens and lets them continue a drafter's tokens",
    ),
    Patch(
        name="drafts_v2",
        why="`ngram` and its hybrid on V2: matching on the device replaces the speculator's propose and, if "
        "needed, its init_cudagraph_manager; without asynchronous scheduling drafts are cut to their "
        "number.",
        symbols=(
            f"{_V2}.model_runner:GPUModelRunner.take_draft_token_ids",
            f"{_V2}.model_runner:init_speculator",
        ),
        until="vLLM's V2 continues drafts with matches and takes drafts of different lengths",
        platform="GPU",
        runners="V2",
    ),
    Patch(
        name="undrafted",
        why="A seed, min_p or logit_bias turns a request's drafts off: speculation breaks a seed, and vLLM "
        "refuses the other two. It wraps the patches that draft.",
        symbols=(
            f"{_V1_RUNNER}.propose_draft_token_ids",
            "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        ),
        until="vLLM's seeds hold under speculation and its rejection sampler applies min_p and logit_bias",
        platform="CPU",
    ),
    Patch(
        name="verify_v1",
        why="With `verifier: baton` our Verifier replaces the model runner's RejectionSampler.",
        symbols=(f"{_V1_RUNNER}.__init__",),
        until="vLLM lets a plug-in name its rejection sampler",
    ),
    Patch(
        name="verify_v2",
        why="The same on V2, once the model is loaded.",
        symbols=(f"{_V2}.model_runner:GPUModelRunner.load_model",),
        until="vLLM lets a plug-in name its rejection sampler",
        platform="GPU",
        runners="V2",
    ),
    Patch(
        name="named_logprobs",
        why="One request's `logprob_token_ids` replace the log-probability columns of the whole batch; with "
        "drafts they end the engine or are lost. With the patch each request gets its own.",
        symbols=(
            "vllm.v1.worker.gpu_input_batch:InputBatch._make_sampling_metadata",
            "vllm.v1.sample.sampler:Sampler.gather_logprobs",
        ),
        until="vLLM's V1 gathers them per request, also with drafts",
    ),
    Patch(
        name="thinking_rows",
        why="A thinking budget outlives its request in its batch row and hits the row's next request; in a "
        "step without drafts it acts on row 0.",
        symbols=(
            "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.sync_batch",
            "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.apply_to_logits",
        ),
        until="vLLM's V1 keeps budgets by request and counts rows right without drafts",
    ),
    Patch(
        name="accepted_states",
        why="A request that a step leaves out resumes with the state of its first drafted token, whatever "
        "was accepted. Unpatched with a prefix cache of states or asynchronous scheduling, where steps "
        "leave no requests out.",
        symbols=(
            f"{_V1_RUNNER}._update_states",
            "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        ),
        until="vLLM keeps the number of accepted tokens with the request",
    ),
    Patch(
        name="step_times",
        why="Measures drafting and verification in each step. Outermost, so that our proposers' time counts "
        "as drafting; V2's propose is timed on the speculator at its first use.",
        symbols=(
            "vllm.v1.worker.gpu_worker:Worker.execute_model",
            "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
            f"{_V1_RUNNER}.propose_draft_token_ids",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ),
        processes=f"{CORE} and {RANKS}",
        until="vLLM's step outputs carry these times",
        runners="V1 and V2",
    ),
    Patch(
        name="held_tokens",
        why="With stop strings vLLM's streams hold back text but not token ids, so a reasoning parser "
        "misses the end of a thought and streams it twice. With the patch both arrive together.",
        symbols=(
            "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request",
            "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        ),
        processes=ROUTER,
        until="vLLM holds back the ids as well",
        runners="V1 and V2",
    ),
)

OBJECTS = (
    ObjectPatch(
        file="services/engine/patches/draft_length.py",
        why="Lets us choose the number of drafted tokens in each step, and none while no request decodes. "
        "update_from_output is wrapped to learn what was accepted.",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
            "vllm.v1.core.sched.scheduler:Scheduler",  # its attribute dynamic_sd_lookup
        ),
        processes=CORE,
        until="vLLM lets a plug-in choose the number",
    ),
    ObjectPatch(
        file="services/engine/patches/first_drafts.py",
        why="vLLM drops the drafts of a request that ends with its prompt, and schedules drafts of running "
        "requests only. Here they travel with the handoff, so a decode worker's first step verifies "
        "them.",
        symbols=(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
            "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        ),
        processes=CORE,
        until="new requests can bring drafts and KV connectors see those at a prompt's end",
    ),
    ObjectPatch(
        file="services/engine/patches/giving_way.py",
        why="vLLM schedules running requests before waiting ones, whatever their priority. Here a step "
        "leaves out requests that give way, and preemptible ones lose slots and KV.",
        symbols=("vllm.v1.core.sched.scheduler:Scheduler.schedule",),
        processes=CORE,
        until="vLLM orders running requests by priority and bounds the share of lower ones",
    ),
    ObjectPatch(
        file="services/engine/patches/early_loads.py",
        why="vLLM cannot take back the blocks of a request that waits for KV. A request whose source has "
        "said nothing yet waits while running requests would lack blocks.",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request",
        ),
        processes=CORE,
        until="vLLM preempts requests that wait for KV, or asks KV connectors before the prefix cache",
    ),
    ObjectPatch(
        file="services/engine/patches/failed_step.py",
        why="vLLM ends an engine whose step raises. Here the host clears what the step left and goes on. "
        "vLLM's report, which prints requests' content, is dropped.",
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
        until="vLLM checks grammars off its loop, within bounds",
    ),
    ObjectPatch(
        file="services/engine/grammars/engine.py",
        why="vLLM compiles all grammars with the first request's backend, in one queue. Here each is "
        "compiled by its own backend, before vLLM's scheduler sees the request.",
        symbols=("vllm.v1.structured_output:StructuredOutputManager._create_grammar",),
        processes=CORE,
        until="vLLM has a backend per request and clients take turns",
    ),
    ObjectPatch(
        file="services/router/vllm/request_limits.py",
        why="vLLM bounds neither prompts times n nor the size of a grammar; both are checked before "
        "anything is rendered.",
        symbols=("vllm.entrypoints.serve.engine.serving",),  # _check_model of the handlers made from it
        until="vLLM bounds both",
    ),
    ObjectPatch(
        file="services/router/vllm/stream_errors.py",
        why="Gives an error that ends a stream the words, status and type of the router's refusals.",
        symbols=(
            "vllm.entrypoints.generate.base.serving:"
            "GenerateBaseServing._convert_generation_error_to_streaming_response",
        ),
        until="vLLM sends an error's own object",
    ),
    ObjectPatch(
        file="services/router/vllm/cut_calls.py",
        why="When max_tokens cuts an unstreamed chat answer after a tool call, vLLM says tool_calls as if "
        "all calls were there.",
        symbols=(
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
        ),
        until="vLLM says length, as in streams",
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
        until="vLLM's handler deals with these",
    ),
    ObjectPatch(
        file="services/router/vllm/response_store.py",
        why="vLLM stores responses for ever, open to anybody who knows an id. A background response counts "
        "for nobody, and its failure is lost.",
        symbols=(
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._run_background_request",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._run_background_request_stream",
            "vllm.entrypoints.openai.responses.serving:"
            "OpenAIServingResponses.responses_background_stream_generator",
        ),
        until="vLLM's store has owners and bounds",
    ),
    ObjectPatch(
        file="services/router/vllm/responses.py",
        why="vLLM reports a cut response as completed, and a failing stream breaks off without an event.",
        symbols=(
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_stream_generator",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_full_generator",
        ),
        until="vLLM streams response.incomplete and response.failed",
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
        why="vLLM tokenizes a whole text, a second and 80 MiB per MiB, before it cuts it. Here long texts "
        "are counted and tokenized in pieces where the ids stay the same.",
        symbols=("vllm.renderers.base:BaseRenderer._tokenize_prompt",),
        until="vLLM stops tokenizing at the model's length",
    ),
    ObjectPatch(
        file="services/router/vllm/error_texts.py",
        why="vLLM searches an error that quotes the request for paths in quadratic time, and returns it "
        "whole. Here it is cut first.",
        symbols=("vllm.entrypoints.serve.exception_handling.utils:sanitize_message",),
        until="vLLM bounds error texts",
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

    Raises StartError, which names the symbol, for another vLLM.
    """
    from vllm.platforms import current_platform

    here = "CPU" if current_platform.is_cpu() else "GPU"
    for patch in PATCHES:
        if patch.platform in ("any", here):
            patch.install()


_HEAD = """# Patches of vLLM

Generated by `python -m baton.services.engine.patches.table > docs/patches.md`;
`tests/services/engine/patches/test_table.py` checks the page, the symbols and the order.

vLLM loads Baton's plug-in (`services/engine/plugin.py`) in every engine process and in the router. The
plug-in applies the patches for the platform in this order. Each uses `replace()`
(`services/engine/patches/replace.py`), which refuses a vLLM whose function has other parameters. All are for
vLLM 0.32 and, unless it says otherwise, for model runner V1 and the processes of tensor-parallel ranks. To
add one, write a module with an `install()`, a row in the table and a test, and generate this page again.

Functions with several wrappers, outermost (the last one applied) first:

"""
_OBJECTS = """## On single objects

These replace something on one object, or during one call.
"""


def page() -> str:
    """Return docs/patches.md, made from the table."""
    parts = [_HEAD + "".join(_shared())]
    for patch in PATCHES:
        usual = {"any", "V1", RANKS}
        where = [one for one in (patch.platform, patch.runners, patch.processes) if one not in usual]
        parts.append(f"## {patch.name}\n\n{_described(patch, where)}")
    parts.append(_OBJECTS)
    parts += [f"### {one.file}\n\n{_described(one, [one.processes])}" for one in OBJECTS]
    return "\n".join(parts)


def _shared() -> Iterator[str]:
    for symbol in dict.fromkeys(symbol for patch in PATCHES for symbol in patch.symbols):
        around = [patch for patch in reversed(PATCHES) if symbol in patch.symbols]
        if len(around) > 1:
            names = ", ".join(map(_with_platform, around))
            yield f"- `{symbol.rpartition(':')[2]}`: {names}\n"


def _with_platform(patch: Patch) -> str:
    return patch.name if patch.platform == "any" else f"{patch.name} ({patch.platform})"


def _described(patch: Patch | ObjectPatch, where: list[str]) -> str:
    symbols = ", ".join(f"`{symbol.replace(':', '.')}`" for symbol in patch.symbols)
    facts = f"- {'; '.join([*where, f'until {patch.until}'])}: {symbols}"
    return f"{_filled(patch.why)}\n\n{_filled(facts, indent='  ')}\n"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(page())
