"""Compile the n-gram search when its proposer is made, and leave OpenMP its number of threads.

Leans on: vllm.v1.spec_decode.ngram_proposer.NgramProposer (`__init__`, `propose`, k, max_model_len) and its
batch_propose_numba and _find_longest_matched_ngram_and_propose_tokens.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    replace(NgramProposer, "__init__", compiling, ("self", "vllm_config"))


def compiling(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor after which a call of `propose` finds its search compiled."""
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
        tokens = np.zeros((1, self.max_model_len), dtype=np.int32)  # shaped as in the model runner's batch
        with warnings.catch_warnings():  # numba's, about lists in its signature
            warnings.simplefilter("ignore")
            self.propose(self.k, [[0]], np.ones(1, dtype=np.int32), tokens)
        # numba has set them for OpenMP, which torch uses too; vLLM made torch.set_num_threads do nothing.
        torch._C.set_num_threads(threads)

    return __init__
