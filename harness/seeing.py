"""Prompts with images for an engine of harness.engines, made in the engine's process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from baton.services.engine.patches.failed_step import FailedStep
from harness.architectures.registry import Architecture
from harness.engines import Answer, Engine, Options
from harness.pictures import noise

TAIL = "Tell me what this is, and do so at some length, please, so that it is long."
WRITTEN = 10  # tokens of an answer
_names = itertools.count()


def options(model: Architecture, worker_id: str, **more: Any) -> Options:
    """Return the options of an engine that takes images, with the guard of Baton's workers."""
    own = {
        "skip_tokenizer_init": False,
        "dtype": model.dtype,
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
        "kv_cache_memory_bytes": 1 << 26,
    }
    return Options(model.target(model.checkpoint()), worker_id, engine=own | model.engine | more, images=True)


def prompt(engine: Engine, mark: str, seeds: Sequence[int], tail: str = TAIL) -> tuple[list[int], list[Any]]:
    """Return a prompt's tokens and vLLM's features of its images, one for each of `seeds`."""
    return prepared(engine.core.vllm_config.model_config, mark, seeds, tail)


def prepared(config: Any, mark: str, seeds: Sequence[int], tail: str = TAIL) -> tuple[list[int], list[Any]]:
    """Return what `prompt` does, but without an engine. config: vLLM's ModelConfig."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.multimodal.utils import argsort_mm_positions
    from vllm.tokenizers import cached_tokenizer_from_config

    processor = MULTIMODAL_REGISTRY.create_processor(config)
    text = "\n".join([mark] * len(seeds)) + tail
    ids = cached_tokenizer_from_config(config).encode(text, add_special_tokens=False)
    if not seeds:
        return ids, []
    items = processor.info.parse_mm_data({"image": [noise(seed) for seed in seeds]})
    made = processor.apply(ProcessorInputs(ids, items), TimingContext(enabled=False))
    items, hashes, places = made["mm_kwargs"], made["mm_hashes"], made["mm_placeholders"]
    features = [
        MultiModalFeatureSpec(items[kind][at], kind, hashes[kind][at], places[kind][at], hashes[kind][at])
        for kind, at in argsort_mm_positions(places)
    ]
    return list(made["prompt_token_ids"]), features


def metadata(features: Sequence[Any]) -> list[Any]:
    from baton.services.engine.images import metadata_of

    return [metadata_of(one) for one in features]


def cold(engine: Engine) -> None:
    """Empty the caches of KV and of encoder outputs."""
    assert engine.core.scheduler.reset_prefix_cache()
    engine.core.reset_encoder_cache()


def preempt(engine: Engine) -> None:
    """Preempt all running requests, and discard their KV and encoder outputs."""
    engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.core.reset_encoder_cache()


def add(engine: Engine, ids: list[int], count: int, *params: Any, **more: Any) -> tuple[str, Answer]:
    """Queue a request under a new name; return its name and answer. See `Engine.made`."""
    name = f"seen-{next(_names)}"
    return name, engine.add(name, ids, count, *params, **more)


def alone(engine: Engine, mark: str, seeds: Sequence[int]) -> list[int]:
    """Answer without a handoff, and leave cold caches."""
    ids, features = prompt(engine, mark, seeds)
    _, answer = add(engine, ids, WRITTEN, features=features)
    engine.run()
    cold(engine)
    return answer.tokens


def fail_step(engine: Engine) -> list[str]:
    """Let the next step fail, and recover; return the requests that were lost."""
    recovery, executor = FailedStep(engine.core), engine.core.model_executor
    execute = executor.execute_model
    executor.execute_model = lambda *_, **__: 1 / 0
    try:
        engine.step()
    except ZeroDivisionError as error:
        executor.execute_model = execute
        return recovery.recover(error)
    raise AssertionError("the step did not fail")
