"""Run OpenAI requests in one batch of an engine, for test_neighbours.py."""

import time
from dataclasses import dataclass, field

LIMIT_S = 60.0


@dataclass
class Told:
    """An engine's answer, without the columns that vLLM's front end ignores."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)  # one per token
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    longest: int = 0  # maximum number of tokens in one step
    finish: str = ""
    stop: str = ""


def together(engine, requests):
    """Run requests in one batch, given by name with the prompt's tokens and the fields of a completion."""
    told = {}
    params = {}
    for name, (tokens, body) in requests.items():
        prompt = list(tokens)
        if "thinking_token_budget" in body:
            prompt += engine.core.vllm_config.reasoning_config.reasoning_start_token_ids
        params[name] = sampling(engine, prompt, body)
        _add(engine, name, prompt, params[name], body.get("cache_salt"))
        told[name] = Told()
    deadline = time.monotonic() + LIMIT_S
    while engine.core.scheduler.has_requests():
        assert time.monotonic() < deadline, "the batch did not come to its end"
        outputs, executed = engine.core.step_fn()
        engine.core.post_step(executed)
        for group in (outputs or {}).values():
            for output in group.outputs:
                _take(told[output.request_id], output, params[output.request_id])
    return told


def sampling(engine, prompt, body):
    """Return the parameters that vLLM's front end makes from a completion's body."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.tokenizers import cached_tokenizer_from_config

    config = engine.core.vllm_config
    tokenizer = cached_tokenizer_from_config(config.model_config)
    made = CompletionRequest(model="m", prompt=prompt, **body)
    params = made.to_sampling_params(made.max_tokens or 1, {})
    params.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
    params.update_from_generation_config({}, tokenizer.eos_token_id)
    params.update_from_tokenizer(tokenizer)
    return params


def _add(engine, name, prompt, params, salt):
    from baton.services.engine import wire

    request = wire.new_request(name, prompt, params, cache_salt=salt)
    engine.core.add_request(*engine.core.preprocess_add_request(request))


def _take(told, output, params):
    told.tokens += output.new_token_ids
    told.longest = max(told.longest, len(output.new_token_ids))
    if output.new_logprobs is not None:
        ids, values, *_ = output.new_logprobs
        told.logprobs += _rows(ids, values, params.num_logprobs)
    if output.new_prompt_logprobs_tensors is not None:
        ids, values, *_ = output.new_prompt_logprobs_tensors
        told.prompt_logprobs += _rows(ids, values, params.prompt_logprobs)
    if output.finish_reason is not None:
        told.finish, told.stop = str(output.finish_reason), str(output.stop_reason)


def _rows(ids, values, wanted):
    width = None if wanted == -1 else 1 + wanted
    return [
        dict(zip(row[:width], numbers[:width], strict=True))
        for row, numbers in zip(ids.tolist(), values.tolist(), strict=True)
    ]
