"""Reword vLLM's reasons for not starting in terms of our configuration.

A refusal whose wording is not in `_SAYINGS` is passed on, with the names of vLLM's arguments translated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

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

# The most frequent refusals, from the user's side.
_SAYINGS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    (
        re.compile(
            r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
            r"\(max_position_embeddings=(?P<most>\d+)"
        ),
        lambda m: (
            f"engine.max_model_len (value {m['asked']}): the model takes at most {m['most']} tokens; "
            "give --max-model-len no more, or leave it out"
        ),
    ),
    (
        re.compile(
            r"max seq len \((?P<tokens>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed"
            r".*?maximum model length is (?P<fits>\d+)"
        ),
        lambda m: (
            f"{m['tokens']} tokens, the longest request, need {m['need']} GiB of KV cache, and there is room "
            f"for {m['fits']}: raise engine.kv_cache_gib (--kv-cache-gib), or lower engine.max_model_len "
            f"(--max-model-len) to {m['fits']}"
        ),
    ),
    (
        re.compile(
            r"Available memory on node (?P<node>\d+) \((?P<free>[\d.]+)/[\d.]+ GiB\) on kv cache allocation "
            r"is less than requested memory for kv \((?P<asked>[\d.]+) GiB\)"
        ),
        lambda m: (
            f"engine.kv_cache_gib (value {m['asked']}): only {m['free']} GiB of memory are free on node "
            f"{m['node']}; lower --kv-cache-gib, or end what uses the memory"
        ),
    ),
    (
        re.compile(
            r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than "
            r"desired GPU memory utilization \([\d.]+, (?P<asked>[\d.]+) GiB\)"
        ),
        lambda m: (
            f"{m['asked']} GiB of the GPU's memory are needed, and {m['free']} of {m['total']} GiB are free: "
            "lower engine.kv_cache_gib (--kv-cache-gib), put fewer workers on this GPU (fleet.devices), or "
            "end what else uses it"
        ),
    ),
    (
        re.compile(r"No common block size for (?P<size>\d+) \(.*?MultipleOf\((?P<of>\d+)\)"),
        lambda m: f"engine.extra.block_size (value {m['size']}): set a multiple of {m['of']}",
    ),
    (
        re.compile(
            r"(?P<asked>torch\.\w+) is not supported for quantization method (?P<how>\w+)\. (?P<what>.*)"
        ),
        lambda m: (
            f"the model is quantized as {m['how']}, which does not go with engine.dtype (--dtype) "
            f"{m['asked'].removeprefix('torch.')}. {m['what']}"
        ),
    ),
    (
        re.compile(r"Cannot find any model weights with `(?P<folder>[^`]*)`"),
        lambda m: f"{m['folder']} holds no weights (*.safetensors): complete it, or pass another --model",
    ),
    (
        re.compile(r"model type `(?P<kind>[^`]*)` but Transformers does not recognize"),
        lambda m: f"its config.json names the model type {m['kind']!r}, which transformers does not have",
    ),
    (
        re.compile(r"couldn't connect to '(?P<hub>[^']*)'"),
        lambda m: (
            f"it is no folder here, and {m['hub']} cannot be reached to look for it there: "
            "pass a model folder with --model"
        ),
    ),
]
_LINKS = re.compile(r"\s*(See|For further information,? (visit|see)) `?https?://\S+( for more details)?\.?")


def reason(error: BaseException, extra: Collection[str] = ()) -> str:
    """Return one line of at most 600 characters on what is wrong. extra: arguments from `engine.extra`."""
    if isinstance(error, BatonError):
        return str(error)
    text = one_line(error)
    for pattern, say in _SAYINGS:
        if found := pattern.search(text):
            return say(found)
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
