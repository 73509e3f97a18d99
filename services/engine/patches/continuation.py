"""Going on with a request elsewhere: the boundary between prompt and output, moved inside the engine.

A request that already wrote n tokens must go on as if it had never moved: penalties, min_tokens,
max_tokens, seeds and grammars count output, so the n tokens are output here too and not a longer
prompt. The host builds vLLM's Request with them as output (`vllm_requests`). vLLM's model runner V2 takes
that as it is. What is left, and done here:

- V1's model runner gets a new request as prompt alone: it is sent prompt + output with n beside it
  (in `SamplingParams.extra_args`, under a key that only the host sets) and splits them again.
- A seeded generator there is n draws behind: it is advanced.
- A grammar starts at its beginning: it is fed the n tokens.

One more thing is mended, for any request: on CPU a seeded request whose prompt is read in several steps
kills V1's engine (`torch.Generator` of the CPU has no offset to rewind). Its generator stays out of the
steps whose sample is thrown away, which is what the rewinding is for.

Leans on: vllm.v1.core.sched.output.NewRequestData.from_request (called without prefill_token_ids by V1
alone); vllm.v1.worker.gpu_input_batch.CachedRequestState (`__post_init__`, fields);
vllm.v1.structured_output.StructuredOutputManager (`_create_grammar`, `_get_constraint_bounds`);
vllm.v1.worker.gpu_model_runner.GPUModelRunner.sample_tokens, its input_batch.generators and
discard_request_mask; a seed on CPU draws one `torch.randint(0, 2**31)` a token
(TopKTopPSampler.forward_cpu), elsewhere one exponential a vocabulary entry.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from baton.services.errors import StartError

# In SamplingParams.extra_args: how many of the tokens sent to V1's model runner are output, and the
# width of its logits (a seeded draw on a GPU is that wide). Removed from whatever a client sends.
GENERATED_KEY = "baton_generated"
VOCABULARY_KEY = "baton_vocabulary"

_MARK = "_baton_continuation"


def install() -> None:
    """Patch vLLM in this process; a second call does nothing.

    Raises StartError when a symbol is not what we lean on: another vLLM.
    """
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _replace(NewRequestData, "from_request", _whole_request_to_v1)
    _replace(CachedRequestState, "__post_init__", _split_again)
    _replace(StructuredOutputManager, "_create_grammar", _feed_grammar)
    _replace(GPUModelRunner, "sample_tokens", _hold_back_generators)


def installed() -> bool:
    """Whether this process's vLLM goes on with requests; false when vLLM did not load our plug-in."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    return hasattr(CachedRequestState.__post_init__, _MARK)


def written(sampling_params: Any) -> int:
    """Tokens of output that came with the request; 0 for one that begins here."""
    extra = getattr(sampling_params, "extra_args", None)
    return int(extra.get(GENERATED_KEY, 0)) if extra else 0


_PARAMETERS = {
    "from_request": ["cls", "request", "block_ids", "prefill_token_ids", "uses_mrope"],
    "__post_init__": ["self"],
    "_create_grammar": ["self", "request"],
    "sample_tokens": ["self", "grammar_output"],
}


def _replace(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(original)` in the place of a method, after a look at its parameters."""
    found = owner.__dict__.get(name)
    original = found.__func__ if isinstance(found, classmethod) else found
    if hasattr(original, _MARK):
        return
    if original is None or list(inspect.signature(original).parameters) != _PARAMETERS[name]:
        raise StartError(
            f"this vLLM's {owner.__module__}.{owner.__qualname__}.{name} does not take {_PARAMETERS[name]}: "
            "install the vLLM version that this Baton is made for"
        )
    patched = functools.wraps(original)(wrap(original))
    setattr(patched, _MARK, True)
    setattr(owner, name, classmethod(patched) if isinstance(found, classmethod) else patched)


def _whole_request_to_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_request(
        cls: Any, request: Any, block_ids: Any, prefill_token_ids: Any = None, uses_mrope: bool = False
    ) -> Any:
        data = original(cls, request, block_ids, prefill_token_ids, uses_mrope)
        if prefill_token_ids is None and written(request.sampling_params):
            data.prompt_token_ids = list(request.all_token_ids)
        return data

    return from_request


def _split_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def __post_init__(self: Any) -> None:
        n = written(self.sampling_params)
        if n and self.prompt_token_ids is not None and not self.output_token_ids:
            self.output_token_ids = self.prompt_token_ids[-n:]
            self.prompt_token_ids = self.prompt_token_ids[:-n]
            if self.generator is not None:
                _advance(self.generator, n, self.sampling_params.extra_args[VOCABULARY_KEY])
        original(self)

    return __post_init__


def _advance(generator: Any, draws: int, vocabulary: int) -> None:
    """Bring a seeded generator to where it was after `draws` sampled tokens."""
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
        # As the manager's accept_tokens, which needs the grammar to be in the request already.
        start, _ = self._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
        if start > len(tokens):
            return grammar  # still reasoning
        request.structured_output_request.reasoning_ended = True
        if not grammar.accept_tokens(request.request_id, tokens[start:]):
            raise ValueError(
                f"the grammar of request {request.request_id} does not allow what it wrote: {tokens[start:]}"
            )
        return grammar

    return _create_grammar


def _hold_back_generators(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators = self.input_batch.generators
        if not generators or self.device.type != "cpu":
            return original(self, grammar_output)
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        held = {index: generators.pop(index) for index in list(generators) if discarded[index]}
        try:
            return original(self, grammar_output)
        finally:
            generators.update(held)

    return sample_tokens
