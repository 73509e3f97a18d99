"""Model runner V2 applies min_p and logit_bias to drafts; its kernels run in Triton's interpreter."""

import os
import re
import sys
from types import SimpleNamespace

from harness import zygote

VOCABULARY, ROWS = 64, 3  # a request with two drafts
BIASED, LIKELY = 7, 3


def test_they_change_the_logits_of_every_draft(tmp_path):
    process = zygote.shared().start("sampling", "tests.services.engine.test_v2_sampling:check", tmp_path)
    assert process.wait(120) == 0, process.text


def _interpret():
    """Import Triton again, because it chooses the interpreter on import, and give it to vLLM."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if re.match(r"triton(\.(?!_C)|$)|vllm\.v1\.worker\.gpu\b", name):
            del sys.modules[name]
    import triton
    import vllm.triton_utils as found
    from triton import language

    # vLLM turns Triton off without a GPU.
    patched = found
    patched.triton, patched.tl = triton, language
    from vllm.v1.worker.gpu import buffer_utils

    from tests.services.engine.host_buffer import HostBuffer

    patched = buffer_utils
    patched.UvaBuffer = HostBuffer


def check():
    """Apply the parameters of a batch with a bias in the first request and min_p in the second.

    Runs in a forked process.
    """
    _interpret()
    import numpy as np
    import torch
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    states = SamplingStates(4, VOCABULARY)
    slots = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.zeros(4, np.int32)), max_num_reqs=4, device=torch.device("cpu")
    )
    config = None
    biases = LogitBiasState(config, slots)
    batch = np.array([2, 0, 1])  # slots of the requests
    needed = np.zeros(4, bool)
    for slot, params in zip(
        batch,
        (SamplingParams(logit_bias={BIASED: 9.0}), SamplingParams(min_p=0.5), SamplingParams()),
        strict=True,
    ):
        needed[slot] = states.add_request(slot, params) | biases.add_request(slot, params)
    states.apply_staged_writes()
    biases.apply_staged_writes()
    sampler = SimpleNamespace(
        needs_logits_processing=needed,
        logits_processors=[biases],
        thinking_budget_state=SimpleNamespace(apply=lambda *_: None),
        sampling_states=states,
    )
    logits = torch.zeros(len(batch) * ROWS, VOCABULARY)
    logits[:, LIKELY] = 5.0
    apply = Sampler.apply_sampling_params
    got = apply(
        sampler,
        logits,
        torch.from_numpy(batch.repeat(ROWS)),
        torch.from_numpy(batch),
        batch,
        torch.arange(len(logits)),
        torch.zeros(len(logits), dtype=torch.int64),
        torch.arange(len(logits)) % ROWS,
        np.full(len(batch), 9),
        skip_top_k_top_p=True,
    )
    biased, cut, plain = got.split(ROWS)
    assert biased[:, BIASED].tolist() == [9.0] * ROWS
    assert biased[:, LIKELY].tolist() == [5.0] * ROWS
    assert torch.isinf(cut).sum(1).tolist() == [VOCABULARY - 1] * ROWS
    assert torch.equal(plain, logits[:ROWS])
