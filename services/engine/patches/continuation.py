"""Continue a request that began on another worker, and treat the tokens it has so far as output.

Penalties, min_tokens, max_tokens, seeds and grammars count output, so the n tokens that a request brings must
be output here too, not a longer prompt. Model runner V2 takes such a Request (services/engine/requests.py) as
it is. V1's treats every new request as a prompt, so it gets prompt and output together, with n in
`SamplingParams.extra_args`, splits them again, and advances a seeded generator by n draws.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces, wrappers

# Keys of SamplingParams.extra_args, removed from whatever a client sends: how many of the tokens sent to V1's
# model runner are output, and the width of its logits, which is also the width of a seeded draw on a GPU.
GENERATED_KEY = "baton_generated"
VOCABULARY_KEY = "baton_vocabulary"


def installed() -> bool:
    """Return whether this process's vLLM continues requests; False if vLLM did not load our plug-in."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    return _split in wrappers(CachedRequestState, "__post_init__")


def generated(sampling_params: Any) -> int:
    """Return how many tokens of output came with the request; 0 for one that begins here."""
    extra = getattr(sampling_params, "extra_args", None)
    return int(extra.get(GENERATED_KEY, 0)) if extra else 0


@replaces("vllm.v1.core.sched.output:NewRequestData.from_request")
def _send_whole(  # noqa: PLR0917 (vLLM's parameters)
    original: Any,
    cls: Any,
    request: Any,
    block_ids: Any,
    prefill_token_ids: Any = None,
    uses_mrope: bool = False,
) -> Any:
    data = original(cls, request, block_ids, prefill_token_ids, uses_mrope)
    if prefill_token_ids is None and generated(request.sampling_params):  # V1 passes no prefill_token_ids
        data.prompt_token_ids = list(request.all_token_ids)
    return data


@replaces("vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__")
def _split(original: Any, self: Any) -> None:
    n = generated(self.sampling_params)
    if n and self.prompt_token_ids is not None and not self.output_token_ids:
        self.output_token_ids = self.prompt_token_ids[-n:]
        self.prompt_token_ids = self.prompt_token_ids[:-n]
        if self.generator is not None:
            _advance(self.generator, n, self.sampling_params.extra_args[VOCABULARY_KEY])
    original(self)


def _advance(generator: Any, draws: int, vocabulary: int) -> None:
    """Advance by `draws` tokens, each an integer on a CPU, elsewhere an exponential per vocabulary entry."""
    import torch

    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (draws,), generator=generator, dtype=torch.long)
        return
    row = torch.empty(vocabulary, dtype=torch.float32, device=generator.device)
    for _ in range(draws):
        row.exponential_(generator=generator)
