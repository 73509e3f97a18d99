"""Compile the n-gram search when its proposer is made, and restore OpenMP's number of threads.

vLLM's warm-up compiles nothing, so the first request stalls the engine for seconds. numba also resets OpenMP
to all cores, which on one core makes operators 30 times slower.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np

from baton.services.engine.patches.replace import replaces


@replaces("vllm.v1.spec_decode.ngram_proposer:NgramProposer.__init__")
def _compile(original: Any, self: Any, vllm_config: Any) -> None:
    import torch
    from vllm.v1.spec_decode import ngram_proposer

    threads = torch.get_num_threads()
    with contextlib.suppress(RuntimeError):  # numba has no writable cache folder
        ngram_proposer.batch_propose_numba.enable_caching()
    original(self, vllm_config)
    tokens = np.zeros((1, self.max_model_len), dtype=np.int32)  # shaped as in the model runner's batch
    with warnings.catch_warnings():  # numba warns about lists in its signature
        warnings.simplefilter("ignore")
        self.propose(self.k, [[0]], np.ones(1, dtype=np.int32), tokens)
    torch._C.set_num_threads(threads)  # vLLM has disabled torch.set_num_threads
