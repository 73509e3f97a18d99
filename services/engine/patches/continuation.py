"""Continue a request that began elsewhere, by moving the boundary between prompt and output in the engine.

A request with n generated tokens must go on as if it had never moved: penalties, min_tokens, max_tokens,
seeds and grammars count output, so the n tokens are output here too and not a longer prompt. The host builds
vLLM's Request with them as output (services/engine/requests.py), which model runner V2 takes unchanged. The
rest is done here:

- V1's model runner sees a new request as prompt alone, so it gets prompt + output with n beside it (in
  `SamplingParams.extra_args`, under a key that only the host sets) and splits them again.
- A seeded generator there is n draws behind: it is advanced.
- A grammar starts at its beginning: it is fed the n tokens.

Leans on: vllm.v1.core.sched.output.NewRequestData.from_request (called without prefill_token_ids by V1
alone); vllm.v1.worker.gpu_input_batch.CachedRequestState (`__post_init__`, fields);
vllm.v1.structured_output.StructuredOutputManager (`_create_grammar`, `_get_constraint_bounds`); a seed on CPU
draws one `torch.randint(0, 2**31)` a token (TopKTopPSampler.forward_cpu), elsewhere one exponential a
vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace, wrappers

# In SamplingParams.extra_args: how many of the tokens sent to V1's model runner are output, and the width of
# its logits (a seeded draw on a GPU is that wide). Removed from whatever a client sends.
GENERATED_KEY = "baton_generated"
VOCABULARY_KEY = "baton_vocabulary"


def install() -> None:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    new_request = ("cls", "request", "block_ids", "prefill_token_ids", "uses_mrope")
    replace(NewRequestData, "from_request", _whole_request_to_v1, new_request)
    replace(CachedRequestState, "__post_init__", _split_again, ("self",))
    replace(StructuredOutputManager, "_create_grammar", _feed_grammar, ("self", "request"))


def installed() -> bool:
    """Return whether this process's vLLM continues requests; False if vLLM did not load our plug-in."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    return _split_again in wrappers(CachedRequestState, "__post_init__")


def generated(sampling_params: Any) -> int:
    """Return how many tokens of output came with the request; 0 for one that begins here."""
    extra = getattr(sampling_params, "extra_args", None)
    return int(extra.get(GENERATED_KEY, 0)) if extra else 0


def _whole_request_to_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_request(
        cls: Any, request: Any, block_ids: Any, prefill_token_ids: Any = None, uses_mrope: bool = False
    ) -> Any:
        data = original(cls, request, block_ids, prefill_token_ids, uses_mrope)
        if prefill_token_ids is None and generated(request.sampling_params):
            data.prompt_token_ids = list(request.all_token_ids)
        return data

    return from_request


def _split_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def __post_init__(self: Any) -> None:
        n = generated(self.sampling_params)
        if n and self.prompt_token_ids is not None and not self.output_token_ids:
            self.output_token_ids = self.prompt_token_ids[-n:]
            self.prompt_token_ids = self.prompt_token_ids[:-n]
            if self.generator is not None:
                _advance(self.generator, n, self.sampling_params.extra_args[VOCABULARY_KEY])
        original(self)

    return __post_init__


def _advance(generator: Any, draws: int, vocabulary: int) -> None:
    """Advance a seeded generator to its state after `draws` sampled tokens."""
    import torch

    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (draws,), generator=generator, dtype=torch.long)
        return
    row = torch.empty(vocabulary, dtype=torch.float32, device=generator.device)
    for _ in range(draws):
        row.exponential_(generator=generator)


def _feed_grammar(original: Callable[..., Any]) -> Callable[..., Any]:
    def _create_grammar(self: Any, request: Any) -> Any:
        grammar = original(self, request)
        tokens = list(request.output_token_ids)
        if not tokens:
            return grammar
        # Like the manager's accept_tokens, which needs the grammar to be in the request already.
        start, _ = self._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
        if start > len(tokens):
            return grammar  # still reasoning
        request.structured_output_request.reasoning_ended = True
        if not grammar.accept_tokens(request.request_id, tokens[start:]):
            raise ValueError(
                f"the grammar of request {request.request_id} does not allow its output: {tokens[start:]}"
            )
        return grammar

    return _create_grammar
