"""The table of our patches of vLLM, in the order in which they are applied.

A row's module is imported when the patch is applied: what it needs of vLLM and torch takes seconds. Where two
patches wrap the same function, the one further down wraps the one further up, so it is called first.
`python -m baton.services.engine.patches.table > docs/patches.md` writes the page.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

CORE, RANKS, ROUTER = "engine core", "tensor-parallel ranks", "router"
EVERYWHERE = "every process that loads vLLM's plug-ins"


@dataclass(frozen=True)
class Patch:
    """One patch of vLLM."""

    name: str  # of its module in this package
    why: str  # a sentence
    symbols: tuple[str, ...]  # what it replaces: MODULE:ATTRIBUTE, or a module of vLLM's that it makes work
    processes: str  # in which it has an effect
    until: str  # what makes it unneeded
    platform: Literal["any", "CPU", "GPU"] = "any"
    runners: str = "V1 and V2"  # vLLM's model runners for which it is

    def install(self) -> None:
        """Apply it in this process; a second call does nothing. Raises StartError for another vLLM."""
        importlib.import_module(f"{__package__}.{self.name}").install()


@dataclass(frozen=True)
class ObjectPatch:
    """A patch of single objects of vLLM's, made where these objects are made."""

    file: str
    why: str
    symbols: tuple[str, ...]
    processes: str
    until: str


_V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu"

PATCHES = (
    Patch(
        name="continuation",
        why="A request that is continued on another worker must count the tokens generated so far as output, "
        "and vLLM knows new requests as prompts alone: V1's model runner is sent both and splits them, a "
        "seeded generator is advanced, a grammar is fed what it has passed.",
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
        why="A seeded request whose prompt takes several steps kills the engine: the generator is rewound "
        "after a step whose sample is thrown away, and a generator of the CPU has no offset to rewind.",
        symbols=(f"{_V1_RUNNER}.sample_tokens",),
        processes=RANKS,
        until="vLLM leaves the generators of such requests alone on a CPU",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.expand_kernel",
        why="Temperature, top-k and top-p of requests with drafts are written into a copy, but for int64: "
        "drafts are verified against uninitialised memory, and outputs have another distribution.",
        symbols=("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
        processes=RANKS,
        until="vLLM's _expand_kernel_impl copies its result back into `output`",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.rotary",
        why="A query [tokens, heads, size], as DeepSeek's attention has it, is taken for [batch, tokens, "
        "size]: heads are rotated by the positions of other tokens.",
        symbols=("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",),
        processes=RANKS,
        until="vLLM's rotary_embedding for CPU takes [tokens, heads, size]",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.punica",
        why="A token without an adapter is given the one in the device's last place, wherever a batch mixes "
        "requests with adapters and without; and the matrices of each single token are gathered before they "
        "are multiplied.",
        symbols=("vllm.platforms.cpu:CpuPlatform.get_punica_wrapper",),
        processes=RANKS,
        until="vLLM's torch_ops for LoRA leave tokens with index -1 alone",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.kernel_binding",
        why="Every object of every module is searched for kernels, which takes 0.3 s, and fails at "
        "llvmlite's, whose `__dict__` is a C function: where numba was imported first no engine starts.",
        symbols=("vllm.triton_utils.dispatcher:_rebind_kernels",),
        processes=RANKS,
        until="vLLM's _rebind_kernels passes over objects without a dictionary",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.ngrams",
        why="The call that is to compile the n-gram search has no request in it and compiles nothing: the "
        "first request waits some seconds, and all others of the engine with it. And numba, when it first "
        "runs, sets OpenMP to as many threads as the machine has cores, whatever the engine was given: on "
        "one core two threads wait for each other in every operator, 30 times as long.",
        symbols=("vllm.v1.spec_decode.ngram_proposer:NgramProposer.__init__",),
        processes=RANKS,
        until="vLLM's NgramProposer compiles when it is made, and restores the number of threads",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.gdn_conv",
        why="After a step with fewer drafts than the most, Gated DeltaNet's convolution reads inputs that "
        "are too old: they were written to the buffer's end, and are read from behind those before them. "
        "Greedy answers are wrong wherever the drafts of a request vary in number; a step of fewer tokens "
        "than the last one had accepted ends the engine.",
        symbols=("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",),
        processes=RANKS,
        until="vLLM's _spec_forward for CPUs keeps `width - 2` inputs before the step's own, however many",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.mamba_drafts",
        why="Mamba-2's functions for a CPU take one token a request and ignore how many of the last step's "
        "were accepted: wherever drafts are verified, answers are wrong.",
        symbols=(
            "vllm.model_executor.layers.mamba.mamba_mixer2:causal_conv1d_update",
            "vllm.model_executor.layers.mamba.mamba_mixer2:selective_state_update",
        ),
        processes=RANKS,
        until="vLLM's functions of these names heed num_accepted_tokens on a CPU",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.amx",
        why="A CPU with AMX is not enough: a process must also have asked the kernel for its tiles, and vLLM "
        "leaves that to oneDNN's first large product. A small model in bfloat16 has none, and the engine's "
        "process dies of SIGILL in its first attention.",
        symbols=("torch.cpu:_is_amx_tile_supported",),
        processes=EVERYWHERE,
        until="vLLM asks for the permission (torch.cpu._init_amx) before it chooses kernels that use AMX",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.inspection",
        why="A model's class is inspected in a process of its own, so that CUDA stays untouched. That "
        "imports vLLM anew: ten seconds of a core for each class, in each process of a deployment, at a "
        "model's first start on a machine.",
        symbols=("vllm.model_executor.models.registry:_run_in_subprocess",),
        processes=EVERYWHERE,
        until="vLLM inspects a class in the calling process on platforms without CUDA",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.gloo",
        why="Each of an engine's 13 groups of ranks has a thread that polls a hundred times a second, also "
        "where the group is this rank alone: half of an idle engine's load on a core.",
        symbols=("torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",),
        processes=RANKS,
        until="vLLM makes no groups of one rank, or Gloo's threads wait until there is something",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.uncompiled",
        why="A comparison and a sum are compiled when somebody first asks for log-probabilities, and some "
        "arithmetic on integers in the first step of each rank of several: all streams of the engine stand "
        "still for seconds, in which Dynamo traces, processes that import torch start, and a C++ compiler "
        "runs.",
        symbols=(
            "vllm.v1.sample.sampler:batched_count_greater_than",
            "vllm.model_executor.layers.vocab_parallel_embedding:get_masked_input_and_mask",
        ),
        processes=RANKS,
        until="vLLM runs both without torch.compile on a CPU",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="cpu.ending",
        why="An engine that is shut down frees the model and collects the garbage of all of vLLM and torch, "
        "for 1.3 s of a core, so that its process could go on: it ends in the next moment, and a drained "
        "worker's place is taken that much later.",
        symbols=(f"{_V1_RUNNER}.shutdown",),
        processes=RANKS,
        until="vLLM collects nothing in a process that ends",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="torchvision",
        why="vLLM's Qwen3.5 imports image processors even for a model without vision, and those import "
        "torchvision, which cannot be installed beside a CPU build of torch: where it is missing, its "
        "modules can be imported, with nothing in them.",
        symbols=("vllm.model_executor.models.qwen3_5",),
        processes=EVERYWHERE,
        until="vLLM's Qwen3.5 can be imported without torchvision",
    ),
    Patch(
        name="idle_drafter",
        why="A step that drafts nothing still runs the drafter over its tokens and samples through the "
        "rejection sampler: with the demo model 40 % slower than without speculation. Here the drafter "
        "runs later, over the tokens of several steps at once. Of all that wrap propose_draft_token_ids it "
        "is the innermost: it stands for vLLM's drafter, whoever calls that.",
        symbols=(f"{_V1_RUNNER}._prepare_inputs", f"{_V1_RUNNER}.propose_draft_token_ids"),
        processes=RANKS,
        until="vLLM skips the drafter in a step that drafts nothing and catches up on its KV later",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="drafts_v1",
        why="Our proposers draft from tokens alone, or continue what vLLM's drafter drafted: they call "
        "vLLM's propose_draft_token_ids, which idle_drafter has wrapped, for as many tokens as they want of "
        "it, or not at all.",
        symbols=(
            f"{_V1_RUNNER}.__init__",
            f"{_V1_RUNNER}._update_states",
            f"{_V1_RUNNER}.propose_draft_token_ids",
        ),
        processes=RANKS,
        until="vLLM hands a custom proposer the batch's tokens, and lets it continue a drafter's tokens",
        runners="V1",
    ),
    Patch(
        name="drafts_v2",
        why="The hybrid with n-grams, and `ngram`, on model runner V2: matches are made on the device in "
        "the place of the speculator's propose, and without asynchronous scheduling each request's drafts "
        "are cut to as many as there are. On each speculator that needs it, propose and "
        "init_cudagraph_manager are replaced as well.",
        symbols=(
            f"{_V2}.model_runner:GPUModelRunner.take_draft_token_ids",
            f"{_V2}.model_runner:init_speculator",
        ),
        processes=RANKS,
        until="vLLM's V2 continues a drafter's tokens with matches, and takes drafts of different lengths",
        platform="GPU",
        runners="V2",
    ),
    Patch(
        name="undrafted",
        why="Requests with a seed, min_p or logit_bias go without drafts beside others that draft: a seed "
        "under speculation reproduces nothing, and vLLM refuses the two others. It takes away drafts, "
        "whoever made them, so it wraps the patches that draft.",
        symbols=(
            f"{_V1_RUNNER}.propose_draft_token_ids",
            "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        ),
        processes=RANKS,
        until="vLLM's seeds hold under speculation, and its rejection sampler applies min_p and logit_bias",
        platform="CPU",
        runners="V1",
    ),
    Patch(
        name="verify_v1",
        why="With `verifier: baton` drafts are verified by our kernel: a Verifier takes the place of the "
        "model runner's RejectionSampler when that has been made. It wraps the constructor that drafts_v1 "
        "has wrapped; neither needs what the other makes.",
        symbols=(f"{_V1_RUNNER}.__init__",),
        processes=RANKS,
        until="vLLM lets a plug-in name its rejection sampler",
        runners="V1",
    ),
    Patch(
        name="verify_v2",
        why="The same on model runner V2: its RejectionSampler's _verify is replaced on the object when the "
        "model has been loaded.",
        symbols=(f"{_V2}.model_runner:GPUModelRunner.load_model",),
        processes=RANKS,
        until="vLLM lets a plug-in name its rejection sampler",
        platform="GPU",
        runners="V2",
    ),
    Patch(
        name="named_logprobs",
        why="`logprob_token_ids` of one request replaces the log-probability columns of the whole batch: its "
        "neighbours get fewer than they asked for, and some invented ones. With drafts the shapes differ, "
        "which ends the engine, or nobody gets any. With the patch each request gets its own columns.",
        symbols=(
            "vllm.v1.worker.gpu_input_batch:InputBatch._make_sampling_metadata",
            "vllm.v1.sample.sampler:Sampler.gather_logprobs",
        ),
        processes=RANKS,
        until="vLLM's V1 gathers the named tokens for the request's own rows only, also with drafts",
        runners="V1",
    ),
    Patch(
        name="thinking_rows",
        why="A thinking budget stays in its row of the batch after its request has ended, so the request "
        "that moves into the row must end a thought that it never began. When an engine that drafts has a "
        "step without drafts, the budget acts on row 0, whichever request is there.",
        symbols=(
            "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.sync_batch",
            "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.apply_to_logits",
        ),
        processes=RANKS,
        until="vLLM's V1 keeps budgets by request, and counts its rows where a step has no drafts",
        runners="V1",
    ),
    Patch(
        name="accepted_states",
        why="A request that a step leaves out comes back with the state of its first drafted token, whatever "
        "was accepted: the number is kept by the batch's rows, and it has none meanwhile. With a prefix "
        "cache of states and with asynchronous scheduling it stays so: no step leaves requests out there.",
        symbols=(
            f"{_V1_RUNNER}._update_states",
            "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        ),
        processes=RANKS,
        until="vLLM keeps the number of accepted tokens with the request",
        runners="V1",
    ),
    Patch(
        name="step_times",
        why="vLLM does not tell how long drafting and verification take in a step. Of all that wrap "
        "propose_draft_token_ids it is the outermost: our proposers' time is drafting too. V2's propose is "
        "timed on the speculator when it is first used.",
        symbols=(
            "vllm.v1.worker.gpu_worker:Worker.execute_model",
            "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
            f"{_V1_RUNNER}.propose_draft_token_ids",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ),
        processes=f"{CORE} and {RANKS}",
        until="vLLM's step outputs carry the times of their parts",
    ),
    Patch(
        name="held_tokens",
        why="In a stream with stop strings vLLM holds back text but not token ids: a reasoning parser sees "
        "the id that ends a thought, looks for its mark in text that has not arrived yet, and streams the "
        "thought twice. With the patch ids and text arrive together.",
        symbols=(
            "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request",
            "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        ),
        processes=ROUTER,
        until="vLLM holds back the ids of the tokens whose text it holds back",
    ),
)

OBJECTS = (
    ObjectPatch(
        file="services/engine/patches/draft_length.py",
        why="The number of tokens to draft is chosen step by step, and nothing is drafted while no request "
        "decodes: the loaded engine's scheduler asks us instead of its list. Its update_from_output, which "
        "step_times has wrapped in the class, is wrapped on the object to learn what was accepted.",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
            "vllm.v1.core.sched.scheduler:Scheduler",  # its attribute dynamic_sd_lookup
        ),
        processes=CORE,
        until="vLLM lets a plug-in choose the number of drafted tokens in a step",
    ),
    ObjectPatch(
        file="services/engine/patches/first_drafts.py",
        why="vLLM drops what is drafted for a request that ends with its prompt, and takes drafts of running "
        "requests alone: a decode worker's first step verified nothing. The loaded engine's scheduler keeps "
        "the former for the handoff, and schedules drafts that a new request comes with, in slots of their "
        "own.",
        symbols=(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
            "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        ),
        processes=CORE,
        until="vLLM's requests come with drafts, and its KV connectors are told of those at a prompt's end",
    ),
    ObjectPatch(
        file="services/engine/patches/giving_way.py",
        why="vLLM schedules what runs before what waits, whatever its priority: long answers fill each step. "
        "The loaded engine's schedule is wrapped: it sees no request that gives way to another class in this "
        "step, and preemptible ones are preempted where those that go first want slots or KV.",
        symbols=("vllm.v1.core.sched.scheduler:Scheduler.schedule",),
        processes=CORE,
        until="vLLM's scheduler orders what runs by priority, and bounds what the lower ones get of a step",
    ),
    ObjectPatch(
        file="services/engine/patches/early_loads.py",
        why="vLLM cannot take back the blocks of a request that waits for another worker's KV. The loaded "
        "engine's scheduler does not look at one whose source has said nothing yet, while the running "
        "requests would lack blocks to grow into.",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request",
        ),
        processes=CORE,
        until="vLLM preempts requests that wait for KV, or asks its KV connectors before the prefix cache",
    ),
    ObjectPatch(
        file="services/engine/patches/failed_step.py",
        why="vLLM ends an engine whose step raises, whichever request caused it. Between steps the host "
        "clears what such a step left behind and goes on; the loaded engine's schedule is wrapped to know "
        "what the step contained. vLLM's report of the step, which prints the requests' content, is dropped.",
        symbols=(
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "vllm.v1.engine.core:EngineCore.log_error_detail",
        ),
        processes=CORE,
        until="vLLM fails the requests of a step that raises, and goes on",
    ),
    ObjectPatch(
        file="services/router/vllm/frontend.py",
        why="vLLM's front end gets our client of the workers instead of starting an engine: AsyncLLM takes "
        "no client as a parameter, so the name of its factory is replaced during one constructor call.",
        symbols=("vllm.v1.engine.async_llm:EngineCoreClient",),
        processes=ROUTER,
        until="vLLM's AsyncLLM takes a client",
    ),
    ObjectPatch(
        file="services/router/vllm/grammar_checks.py",
        why="vLLM's front end parses each grammar on its event loop, in C++ and Rust, where some take "
        "gigabytes or end the process. A router only checks the form, and a worker does the rest in a "
        "process that can be ended.",
        symbols=(
            "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
            "vllm.v1.structured_output.backend_guidance:validate_guidance_grammar",
            "vllm.v1.structured_output.backend_outlines:validate_structured_output_request_outlines",
            "vllm.v1.structured_output.backend_lm_format_enforcer:"
            "validate_structured_output_request_lm_format_enforcer",
            "vllm.sampling_params:_get_llg_tokenizer",
        ),
        processes=ROUTER,
        until="vLLM's front end checks grammars off its loop, within bounds",
    ),
    ObjectPatch(
        file="services/engine/grammars/engine.py",
        why="vLLM's manager lets the first request's backend compile everybody's grammars: a grammar meant "
        "for another backend changes its meaning or is refused. Compilations of all clients wait in one "
        "queue. Here each grammar is compiled by its own backend, through a view of the manager, before "
        "vLLM's scheduler sees the request.",
        symbols=("vllm.v1.structured_output:StructuredOutputManager._create_grammar",),
        processes=CORE,
        until="vLLM's manager has a backend for each request, and clients take turns",
    ),
    ObjectPatch(
        file="services/router/vllm/request_limits.py",
        why="vLLM bounds neither prompts times n nor the size of a grammar: the check is put in front of "
        "each handler of the app, before anything is rendered.",
        symbols=("vllm.entrypoints.serve.engine.serving",),  # _check_model of the handlers made from it
        processes=ROUTER,
        until="vLLM bounds both",
    ),
    ObjectPatch(
        file="services/router/vllm/stream_errors.py",
        why="An error that ends a stream is worded like the router's refusals, with their status and type.",
        symbols=(
            "vllm.entrypoints.generate.base.serving:"
            "GenerateBaseServing._convert_generation_error_to_streaming_response",
        ),
        processes=ROUTER,
        until="vLLM sends an error's own object",
    ),
    ObjectPatch(
        file="services/router/vllm/cut_calls.py",
        why="When max_tokens cuts a chat answer that is not streamed after a tool call, vLLM's finish_reason "
        "is tool_calls, as if all calls were there.",
        symbols=(
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
        ),
        processes=ROUTER,
        until="vLLM says length, as it does in streams",
    ),
    ObjectPatch(
        file="services/router/vllm/messages.py",
        why="Anthropic's handler logs each refusal with a traceback, cannot read an error in the stream that "
        "it converts, and parses the arguments of tool calls that were cut.",
        symbols=(
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages",
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.count_tokens",
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter",
            "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.messages_full_converter",
        ),
        processes=ROUTER,
        until="vLLM's handler raises unexpected errors, and converts errors and cut calls",
    ),
    ObjectPatch(
        file="services/router/vllm/response_store.py",
        why="vLLM stores responses for ever and for anybody who knows an id, which a client may choose. A "
        "background response counts for nobody, and its failure is not recorded.",
        symbols=(
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._run_background_request",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._run_background_request_stream",
            "vllm.entrypoints.openai.responses.serving:"
            "OpenAIServingResponses.responses_background_stream_generator",
        ),
        processes=ROUTER,
        until="vLLM's store has owners and bounds",
    ),
    ObjectPatch(
        file="services/router/vllm/responses.py",
        why="vLLM reports a response that was cut as completed, and a stream that fails breaks off without "
        "an event.",
        symbols=(
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_stream_generator",
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.responses_full_generator",
        ),
        processes=ROUTER,
        until="vLLM streams response.incomplete and response.failed",
    ),
    ObjectPatch(
        file="services/router/vllm/quick_unions.py",
        why="pydantic tries all members of a union for every item of a list. The request models get "
        "validators that accept the same bodies, but try only the members that match an item's `type` or "
        "`role`, and stop at the first wrong item.",
        symbols=(
            "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
            "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        ),
        processes=ROUTER,
        until="vLLM's unions have discriminators, and its lists fail fast",
    ),
    ObjectPatch(
        file="services/router/vllm/tokenizing.py",
        why="vLLM tokenizes a whole text, which takes a second and 80 MiB per MiB, before it cuts it to the "
        "model's length. A text that is unlikely to fit is first counted a piece at a time, and a long one "
        "that fits is tokenized in pieces where that surely gives the same ids.",
        symbols=("vllm.renderers.base:BaseRenderer._tokenize_prompt",),
        processes=ROUTER,
        until="vLLM's tokenizing ends at the model's length",
    ),
    ObjectPatch(
        file="services/router/vllm/error_texts.py",
        why="vLLM searches an error that quotes the request for paths, in time quadratic in its length, and "
        "sends it back whole. Here it is cut first.",
        symbols=("vllm.entrypoints.serve.exception_handling.utils:sanitize_message",),
        processes=ROUTER,
        until="vLLM bounds the texts of errors",
    ),
    ObjectPatch(
        file="services/router/vllm/large_answers.py",
        why="vLLM builds and encodes an answer with thousands of log-probabilities in one go, while all "
        "streams wait. Here its long lists are built and encoded a few entries at a time.",
        symbols=(
            "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse.model_dump",
            "vllm.entrypoints.openai.completion.protocol:CompletionResponse.model_dump",
            "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTextResponse.model_dump",
            "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensResponse.model_dump",
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs",
            "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
        ),
        processes=ROUTER,
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

Written by `python -m baton.services.engine.patches.table > docs/patches.md` from
`services/engine/patches/table.py`. `tests/services/engine/patches/test_table.py` checks the page, that the
symbols exist, and the order.

To add one: a module NAME.py in `services/engine/patches` whose `install()` calls `replace()`, a row
`Patch(name="NAME", ...)` in the table, this page written anew, and a test beside that of the others.

vLLM loads Baton's plug-in (`services/engine/plugin.py`) in every process of an engine and in the router, and
the plug-in applies the patches for the platform in this order. Each puts wrappers around functions by
`replace()` (`services/engine/patches/replace.py`), which refuses a vLLM whose function has other parameters.
Where several wrap the same function, the later one is further out. All are made for vLLM 0.32; what would
make one unneeded stands under "until".

Functions that several patches wrap, with the patch that is called first on the left and the one called last,
before vLLM's own, on the right; they are applied in the opposite order. Some are for one platform only:

"""
_OBJECTS = """## On single objects

These replace something on objects that vLLM has made, or for the time of one call, where it is made.
"""


def page() -> str:
    """Return docs/patches.md, made from the table."""
    parts = [_HEAD + "".join(_shared())]
    for number, patch in enumerate(PATCHES, 1):
        facts = {"platform": patch.platform, "model runner": patch.runners, "processes": patch.processes}
        parts.append(f"## {number}. {patch.name}\n\n{_described(patch, facts)}")
    parts.append(_OBJECTS)
    for one in OBJECTS:
        parts.append(f"### {one.file}\n\n{_described(one, {'processes': one.processes})}")
    return "\n".join(parts)


def _shared() -> Iterator[str]:
    for symbol in dict.fromkeys(symbol for patch in PATCHES for symbol in patch.symbols):
        around = [patch for patch in reversed(PATCHES) if symbol in patch.symbols]
        if len(around) > 1:
            names = ", ".join(map(_with_platform, around))
            yield f"- `{symbol.rpartition(':')[2]}`: {names}\n"


def _with_platform(patch: Patch) -> str:
    return patch.name if patch.platform == "any" else f"{patch.name} ({patch.platform})"


def _described(patch: Patch | ObjectPatch, facts: dict[str, str]) -> str:
    symbols = ", ".join(f"`{symbol.replace(':', '.')}`" for symbol in patch.symbols)
    points = {"replaces": symbols, **facts, "until": patch.until}
    lines = [_filled(f"- {name}: {text}", indent="  ") for name, text in points.items()]
    return "\n".join([_filled(patch.why), "", *lines, ""])


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(page())
