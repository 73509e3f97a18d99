"""What is wrong in vLLM 0.32's CPU back end, mended where it is wrong.

Each mend names what is wrong, and when it can go. `tests/services/engine/patches/test_cpu.py` shows for each
that the shipped function is wrong and the mended one right: the day vLLM's own becomes right, that test fails
and says which mend to delete. On a GPU nothing is touched.

Leans on: vllm.utils.cpu_triton_utils._expand_kernel_impl, which a worker registers after it has loaded the
plug-ins (vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker), and on Triton's order of its arguments;
vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu;
vllm.triton_utils.dispatcher._rebind_kernels, which looks through sys.modules;
vllm.v1.spec_decode.ngram_proposer.NgramProposer (`__init__`, `propose`, k, max_model_len) and its
batch_propose_numba and _find_longest_matched_ngram_and_propose_tokens;
torch.cpu._init_amx, and torch.cpu._is_amx_tile_supported, which vLLM asks by this name before it chooses
kernels that use AMX's tiles; vllm.model_executor.models.registry._run_in_subprocess;
vllm.v1.sample.sampler.batched_count_greater_than and
vllm.model_executor.layers.vocab_parallel_embedding.get_masked_input_and_mask, which torch.compile wraps;
torch.distributed's ProcessGroupGloo and its _Options (_devices, _threads, _timeout).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np

from baton.services.errors import StartError

logger = logging.getLogger(__name__)

_MARK = "_baton_mend"
_HOLD_KERNELS = ("vllm", "baton")  # packages whose modules may have vLLM's Triton kernels as attributes


@dataclass(frozen=True)
class Mend:
    """One function of vLLM's that is put right."""

    wrong: str  # what the shipped function does
    until: str  # when the mend can go
    place: Callable[[], tuple[Any, str]]  # whose attribute the function is, and its name
    parameters: tuple[str, ...]  # of the shipped function, as the mended one leans on them
    mended: Callable[[Callable[..., Any]], Callable[..., Any]]  # from the shipped function


def install() -> None:
    """Put every mend in place, in a process of a CPU engine; a second call does nothing.

    Raises StartError when a function does not take what its mend leans on: another vLLM.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for mend in MENDS:
            _apply(mend)


def _apply(mend: Mend) -> None:
    owner, name = mend.place()
    shipped = getattr(owner, name)
    if hasattr(shipped, _MARK):
        return
    if _parameters_of(shipped) != mend.parameters:
        raise StartError(
            f"this vLLM's {owner.__name__}.{name} does not take {', '.join(mend.parameters)}: "
            "install the vLLM version that this Baton is made for"
        )
    mended = functools.wraps(shipped)(mend.mended(shipped))  # the shipped one stays at __wrapped__
    setattr(mended, _MARK, True)
    setattr(owner, name, mended)


def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # one of C++, whose first overload stands in what pybind11 says of it
        first = re.search(r"^1\. \w+\((.*)\) ->", function.__doc__ or "", re.MULTILINE)
        return tuple(re.findall(r"(\w+): ", first[1])) if first else ()


def _place_of_expand() -> tuple[Any, str]:
    from vllm.utils import cpu_triton_utils

    return cpu_triton_utils, "_expand_kernel_impl"


def _expand(shipped: Callable[..., Any]) -> Callable[..., Any]:
    del shipped

    def expand_kernel_impl(output: Any, input_val: Any, cu_num_tokens: Any, *figures: int) -> None:
        """[tokens], written; [batch]; [batch]: where each request's tokens end."""
        replace_from, replace_to = figures[:2]
        values = input_val.masked_fill(input_val == replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        output.copy_(values.repeat_interleave(counts, output_size=output.shape[0]))

    return expand_kernel_impl


def _place_of_rotary() -> tuple[Any, str]:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding, "forward_cpu"


def _rotary(shipped: Callable[..., Any]) -> Callable[..., Any]:
    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        # [..., heads, size] goes in as [..., heads * size]: that form is right.
        with_heads = positions.dim() + 2
        flat = [
            one.flatten(-2) if one is not None and one.dim() == with_heads else one for one in (query, key)
        ]
        rotated = shipped(self, positions, *flat)
        for given, one in zip((query, key), rotated, strict=True):
            if given is not None and one.data_ptr() != given.data_ptr():
                given.copy_(one.view_as(given))  # a slice was copied; callers lean on it being done in place
        return query, key

    return forward_cpu


def _place_of_rebind() -> tuple[Any, str]:
    from vllm.triton_utils import dispatcher

    return dispatcher, "_rebind_kernels"


def _rebind(shipped: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.triton_utils import dispatcher

    def rebind_kernels(overrides: Any) -> None:
        holders = {name: one for name, one in sys.modules.items() if name.partition(".")[0] in _HOLD_KERNELS}
        dispatcher.sys = SimpleNamespace(modules=holders)
        try:
            shipped(overrides)
        finally:
            dispatcher.sys = sys

    return rebind_kernels


def _place_of_ngrams() -> tuple[Any, str]:
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    return NgramProposer, "__init__"


def _ngrams(shipped: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from vllm.v1.spec_decode import ngram_proposer

    def __init__(self: Any, vllm_config: Any) -> None:
        threads = torch.get_num_threads()
        for search in (
            ngram_proposer.batch_propose_numba,
            ngram_proposer._find_longest_matched_ngram_and_propose_tokens,
        ):
            with contextlib.suppress(RuntimeError):  # numba found no folder that it may write to
                search.enable_caching()
        shipped(self, vllm_config)
        tokens = np.zeros((1, self.max_model_len), dtype=np.int32)  # as the model runner's batch has them
        with warnings.catch_warnings():  # numba's, of lists in its signature
            warnings.simplefilter("ignore")
            self.propose(self.k, [[0]], np.ones(1, dtype=np.int32), tokens)
        # numba has set them for OpenMP, which torch uses too; vLLM made torch.set_num_threads do nothing.
        torch._C.set_num_threads(threads)

    return __init__


def _place_of_amx() -> tuple[Any, str]:
    import torch

    return torch.cpu, "_is_amx_tile_supported"


def _amx(shipped: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache  # asked at every step of some models; what the kernel gave, forked children have too
    def _is_amx_tile_supported() -> bool:
        import torch

        if not shipped():
            return False
        permitted: bool = torch.cpu._init_amx()
        if not permitted:
            logger.warning(
                "this CPU has AMX, but the kernel does not let this process use its AMX (Linux before 5.16, "
                "or a sandbox that refuses arch_prctl): slower kernels without it are used"
            )
        return permitted

    return _is_amx_tile_supported


def _place_of_inspection() -> tuple[Any, str]:
    from vllm.model_executor.models import registry

    return registry, "_run_in_subprocess"


def _inspection(shipped: Callable[..., Any]) -> Callable[..., Any]:
    del shipped

    def run_in_this_process(fn: Callable[[], Any]) -> Any:
        return fn()

    return run_in_this_process


def _place_of_gloo() -> tuple[Any, str]:
    from torch.distributed import distributed_c10d

    return distributed_c10d.ProcessGroupGloo, "__init__"


@functools.cache
def _gloo_device(pid: int) -> Any:
    """The one of this process: a forked one has no thread of its parent's."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    del pid
    return ProcessGroupGloo.create_default_device()


def _gloo(shipped: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if size > 1:
            shipped(self, store, rank, size, timeout)
            return
        options = type(self)._Options()
        options._devices, options._threads, options._timeout = [_gloo_device(os.getpid())], 1, timeout
        shipped(self, store, rank, size, options)

    return __init__


def _place_of_ranks() -> tuple[Any, str]:
    from vllm.v1.sample import sampler

    return sampler, "batched_count_greater_than"


def _place_of_masks() -> tuple[Any, str]:
    from vllm.model_executor.layers import vocab_parallel_embedding

    return vocab_parallel_embedding, "get_masked_input_and_mask"


def _uncompiled(shipped: Callable[..., Any]) -> Callable[..., Any]:
    plain = inspect.unwrap(shipped)  # what torch.compile was given

    def uncompiled(*args: Any) -> Any:
        return plain(*args)

    return uncompiled


MENDS = (
    Mend(
        wrong="temperature, top-k and top-p of requests with drafts are written into a copy, but for int64: "
        "drafts are verified against uninitialised memory and answers have another distribution",
        until="vLLM's _expand_kernel_impl copies what it wrote back into `output`",
        place=_place_of_expand,
        parameters=(
            "output",
            "input_val",
            "cu_num_tokens",
            "replace_from",
            "replace_to",
            "MAX_NUM_TOKENS",
        ),
        mended=_expand,
    ),
    Mend(
        wrong="a query [tokens, heads, size], as DeepSeek's attention has it, is read as [batch, tokens, "
        "size]: heads are rotated by the positions of other tokens",
        until="vLLM's rotary_embedding for CPU takes [tokens, heads, size]",
        place=_place_of_rotary,
        parameters=("self", "positions", "query", "key"),
        mended=_rotary,
    ),
    Mend(
        wrong="it looks into every object of every module, which takes 0.3 s, and fails at llvmlite's, "
        "whose __dict__ is a C function: where numba was imported first no engine starts",
        until="vLLM's _rebind_kernels passes over what has no dictionary",
        place=_place_of_rebind,
        parameters=("overrides",),
        mended=_rebind,
    ),
    Mend(
        wrong="its first call, which is to compile the n-gram search, has no request in it and compiles "
        "nothing: the first request waits some seconds for that, and all others of the engine with it; and "
        "numba, when it first runs, sets OpenMP to as many threads as the machine has cores, whatever the "
        "engine was told to use: on one core two wait for each other in every operator, 30 times as long",
        until="vLLM's NgramProposer compiles when it is made, and puts the number of threads back",
        place=_place_of_ngrams,
        parameters=("self", "vllm_config"),
        mended=_ngrams,
    ),
    Mend(
        wrong="it says whether the CPU has AMX, but a process must also have asked the kernel for its tiles, "
        "and vLLM leaves that to oneDNN's first large product: a small model in bfloat16 has none, and "
        "the engine's process dies of SIGILL in its first attention",
        until="vLLM asks for the permission (torch.cpu._init_amx) before it chooses kernels that use AMX",
        place=_place_of_amx,
        parameters=(),
        mended=_amx,
    ),
    Mend(
        wrong="what a model can do is asked of its class in a process of its own, so that CUDA stays "
        "untouched; that imports vLLM anew: ten seconds of a core for each class, in each process of a "
        "deployment, at a model's first start on a machine",
        until="vLLM inspects a class where it is on platforms without CUDA",
        place=_place_of_inspection,
        parameters=("fn",),
        mended=_inspection,
    ),
    Mend(
        wrong="each of an engine's 13 groups of ranks has a thread that looks for messages a hundred times a "
        "second, also where the group is this rank alone: half of what an idle engine takes of a core",
        until="vLLM makes no groups of one rank, or Gloo's threads wait until there is something",
        place=_place_of_gloo,
        parameters=("self", "store", "rank", "size", "options"),
        mended=_gloo,
    ),
    Mend(
        wrong="a comparison and a sum, compiled when somebody first asks for log-probabilities: all streams "
        "of the engine stand still for seconds, in which Dynamo traces, processes that import torch start, "
        "and a C++ compiler runs",
        until="vLLM counts ranks without torch.compile on a CPU",
        place=_place_of_ranks,
        parameters=("x", "values"),
        mended=_uncompiled,
    ),
    Mend(
        wrong="the same of some integers, in the first step of each rank of several",
        until="vLLM masks tokens of other ranks without torch.compile on a CPU",
        place=_place_of_masks,
        parameters=(
            "input_",
            "org_vocab_start_index",
            "org_vocab_end_index",
            "num_org_vocab_padding",
            "added_vocab_start_index",
            "added_vocab_end_index",
        ),
        mended=_uncompiled,
    ),
)
