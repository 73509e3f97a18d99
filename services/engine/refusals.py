"""Reword vLLM's reasons for not starting in terms of our configuration.

A refusal whose wording is not in `_SAYINGS` is passed on, with the names of vLLM's arguments translated.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from baton.errors import BatonError
from baton.services.errors import one_line

LONGEST = 600  # characters
_LONG_LIST = 12  # entries; vLLM lists all known architectures

# vLLM's arguments, command-line flags and variables -> their settings here.
_ALIKE = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("tensor_parallel_size", "pipeline_parallel_size"),
)
_NAMES = {name: f"engine.{name} (--{name.replace('_', '-')})" for name in _ALIKE}
_NAMES |= dict.fromkeys(
    ("gpu_memory_utilization", "kv_cache_memory_bytes", "VLLM_CPU_KVCACHE_SPACE"),
    "engine.kv_cache_gib (--kv-cache-gib)",
)
_NAMES |= {name.replace("_", "-"): setting for name, setting in _NAMES.items()}
_NAME = re.compile(rf"`?(?<![\w.])(?:--)?(?P<name>{'|'.join(map(re.escape, _NAMES))})(?![\w-])`?")

# The most frequent refusals, reworded from the user's point of view.
_SAYINGS = {
    re.compile(pattern): saying
    for pattern, saying in (
        (
            r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
            r"\(max_position_embeddings=(?P<most>\d+)",
            "engine.max_model_len (value {asked}): the model takes at most {most} tokens; give "
            "--max-model-len no more, or leave it out",
        ),
        (
            r"max seq len \((?P<tokens>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed"
            r".*?maximum model length is (?P<fits>\d+)",
            "{tokens} tokens, the longest request, need {need} GiB of KV cache, and there is room for {fits}"
            ": raise engine.kv_cache_gib (--kv-cache-gib), or lower engine.max_model_len (--max-model-len) "
            "to {fits}",
        ),
        (
            r"Available memory on node (?P<node>\d+) \((?P<free>[\d.]+)/[\d.]+ GiB\) on kv cache allocation "
            r"is less than requested memory for kv \((?P<asked>[\d.]+) GiB\)",
            "engine.kv_cache_gib (value {asked}): only {free} GiB of memory are free on node {node}; lower "
            "--kv-cache-gib, or end what uses the memory",
        ),
        (
            r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than "
            r"desired GPU memory utilization \([\d.]+, (?P<asked>[\d.]+) GiB\)",
            "{asked} GiB of the GPU's memory are needed, and {free} of {total} GiB are free: lower "
            "engine.kv_cache_gib (--kv-cache-gib), put fewer workers on this GPU (fleet.devices), or end "
            "what else uses it",
        ),
        (
            r"No common block size for (?P<size>\d+) \(.*?MultipleOf\((?P<of>\d+)\)",
            "engine.extra.block_size (value {size}): set a multiple of {of}",
        ),
        (
            r"torch\.(?P<asked>\w+) is not supported for quantization method (?P<how>\w+)\. (?P<what>.*)",
            "the model is quantized as {how}, which does not go with engine.dtype (--dtype) {asked}. {what}",
        ),
        (
            r"Cannot find any model weights with `(?P<folder>[^`]*)`",
            "{folder} holds no weights (*.safetensors): complete it, or pass another --model",
        ),
        (
            r"model type `(?P<kind>[^`]*)` but Transformers does not recognize",
            "its config.json names the model type {kind!r}, which transformers does not have",
        ),
        (
            r"couldn't connect to '(?P<hub>[^']*)'",
            "it is no folder here, and {hub} cannot be reached to look for it there: pass a model folder "
            "with --model",
        ),
    )
}
_LINKS = re.compile(r"\s*(See|For further information,? (visit|see)) `?https?://\S+( for more details)?\.?")


def reason(error: BaseException, extra: Collection[str] = ()) -> str:
    """Return one line of at most 600 characters on what is wrong. extra: arguments from `engine.extra`."""
    if isinstance(error, BatonError):
        return str(error)
    text = one_line(error)
    for pattern, saying in _SAYINGS.items():
        if found := pattern.search(text):
            return saying.format(**found.groupdict())
    text = _shorten_lists(_LINKS.sub("", text))
    text = _NAME.sub(lambda m: m[0] if m["name"] in extra else _NAMES[m["name"]], text)
    for name in (one for one in extra if "_" in one):  # names without "_" may be ordinary words
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", f"engine.extra.{name}", text, count=1)
    if isinstance(error, KeyError) or not text:  # a KeyError's text is only the key
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _shorten_lists(text: str) -> str:
    def shortened(found: re.Match[str]) -> str:
        entries = found[0].split(", ")
        if len(entries) <= _LONG_LIST:
            return found[0]
        return f"{', '.join(entries[:_LONG_LIST])}, ... ({len(entries)} in all)"

    return re.sub(r"'[^']*'(?:, '[^']*')+", shortened, text)
