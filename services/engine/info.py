"""Read the size and limits of a loaded engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton.services.engine.args import takes_images
from baton.services.engine.patches import undrafted
from baton.services.engine.step import EngineLoad
from baton.services.engine.step_checks import StepLimits


@dataclass(frozen=True)
class EngineInfo:
    max_model_len: int  # tokens
    block_size: int  # tokens
    num_blocks: int  # blocks of `block_size` tokens of all layers
    free_blocks: int  # when idle; vLLM keeps one for itself
    max_num_seqs: int
    max_num_batched_tokens: int
    lookahead_tokens: int  # 1 + the maximum number of drafted tokens
    vocabulary: int
    drafts_always: bool  # whether it drafts and cannot exempt individual requests
    block_share: float = 1.0  # the size of a vLLM block in our blocks; not 1 if layers keep different tokens
    runner_v2: bool = False  # whether it uses vLLM's model runner V2
    prompt_logprobs: bool = True  # whether the model computes logits of prompts
    images: bool = False  # whether it takes images
    encodes: bool = False  # whether it computes only images
    image_tokens: int = 0  # tokens of the largest image that the engine's encoder cache can hold

    @property
    def steps(self) -> StepLimits:
        return StepLimits(self.vocabulary, self.runner_v2, self.drafts_always, self.prompt_logprobs)


# The number of blocks that an engine without KV reports: more than a scheduler can book.
_NO_LIMIT = 1 << 20


def info_of(engine: Any) -> EngineInfo:
    config = engine.vllm_config
    speculative = config.speculative_config
    share = _block_share(engine)
    found = EngineInfo(
        max_model_len=config.model_config.max_model_len,
        block_size=_block_size(config.cache_config),
        num_blocks=int((config.cache_config.num_gpu_blocks or 0) * share),
        free_blocks=int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * share),
        block_share=share,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        lookahead_tokens=1 + (speculative.num_speculative_tokens if speculative else 0),
        vocabulary=config.model_config.get_vocab_size(),
        drafts_always=speculative is not None and not undrafted.supported(),
        runner_v2=config.use_v2_model_runner,
        prompt_logprobs=not config.cache_config.kv_sharing_fast_prefill,
        images=takes_images(config.model_config),
        image_tokens=engine.scheduler.encoder_cache_manager.cache_size,
    )
    if not config.is_mm_encoder_only:
        return found
    size, most = found.max_model_len, _NO_LIMIT
    return replace(found, encodes=True, block_size=size, num_blocks=most, free_blocks=most - 1)


def load_of(engine: Any, info: EngineInfo) -> EngineLoad:
    scheduler = engine.scheduler
    running, waiting = scheduler.get_request_counts()
    free = int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * info.block_share)
    if info.encodes:
        free = info.free_blocks
    return EngineLoad(running, waiting, free, len(scheduler.deferred_waiting))


def _block_size(cache: Any) -> int:
    """Return the block size, in tokens, of full attention or, without such a group, of the smallest group."""
    return int(cache.effective_attention_block_size or cache.block_size)


def _block_share(engine: Any) -> float:
    """Return the size of a vLLM block in our blocks of `_block_size` tokens.

    Groups of layers that keep different tokens take separate blocks from one pool: a token has a block in
    each group until it leaves the group's window. vLLM reports how many tokens the pool holds for requests of
    the greatest length. The groups' blocks may differ in size, so a vLLM block may be larger than ours, up to
    the largest group's block. (If all layers have windows, this limit keeps short requests, which never leave
    a window, from being booked beyond the pool.)
    """
    cache, groups = engine.vllm_config.cache_config, engine.scheduler.kv_cache_config.kv_cache_groups
    if len(groups) < 2 or not cache.num_gpu_blocks:
        return 1.0
    from vllm.v1.kv_cache_interface import AttentionSpec  # a block of a state counts as a whole request

    specs = (group.kv_cache_spec for group in groups)
    largest = max((one.block_size for one in specs if isinstance(one, AttentionSpec)), default=0)
    held, ours = cache.kv_cache_size_tokens / cache.num_gpu_blocks, _block_size(cache)  # tokens per block
    return float(min(max(largest, ours), held) / ours)
