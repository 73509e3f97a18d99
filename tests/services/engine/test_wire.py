"""Structs survive encoding, with arrays of any size, and invalid bytes are refused."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from baton.services.engine import wire


def _request(**changes):
    fields = {
        "request_id": "chatcmpl-1",
        "prompt_token_ids": list(range(1000)),
        "mm_features": None,
        "sampling_params": SamplingParams(
            max_tokens=7, seed=3, temperature=0.5, logprobs=2, extra_args={"kv_transfer_params": {"a": 1}}
        ),
        "pooling_params": None,
        "arrival_time": 12.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**(fields | changes))


def test_request_survives():
    there = _request()
    back = wire.decode_request(wire.encode_request(there))
    assert back.prompt_token_ids == there.prompt_token_ids
    assert back.sampling_params == there.sampling_params
    assert (back.request_id, back.arrival_time) == ("chatcmpl-1", 12.5)


def test_request_with_a_tensor_is_one_frame():
    embeds = torch.randn(300, 64)
    back = wire.decode_request(wire.encode_request(_request(prompt_token_ids=None, prompt_embeds=embeds)))
    assert torch.equal(back.prompt_embeds, embeds)


def _outputs(rows):
    ids = np.arange(rows * 21, dtype=np.int32).reshape(rows, 21)
    prompt = LogprobsTensors(
        torch.arange(rows * 3).reshape(rows, 3), torch.randn(rows, 3), torch.arange(rows)
    )
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id="a",
                new_token_ids=[5, 6],
                new_logprobs=LogprobsLists(ids, ids.astype(np.float32) / 7, ids[:, 0], None),
                new_prompt_logprobs_tensors=prompt,
                finish_reason=FinishReason.STOP,
                stop_reason="end",
            ),
            EngineCoreOutput(request_id="b", new_token_ids=[9]),
        ],
        timestamp=4.0,
    )


@pytest.mark.parametrize("rows", [1, 431])  # below and far above vLLM's threshold for separate frames
def test_outputs_survive(rows):
    there = _outputs(rows)
    back = wire.decode_outputs(wire.encode_outputs(there))
    first, second = back.outputs
    assert (first.new_token_ids, first.finish_reason, first.stop_reason) == ([5, 6], FinishReason.STOP, "end")
    assert (second.request_id, second.finish_reason, back.timestamp) == ("b", None, 4.0)
    for ours, theirs in zip(first.new_logprobs[:3], there.outputs[0].new_logprobs[:3], strict=True):
        assert np.array_equal(ours, theirs)
    for ours, theirs in zip(
        first.new_prompt_logprobs_tensors[:3], there.outputs[0].new_prompt_logprobs_tensors[:3], strict=True
    ):
        assert torch.equal(ours, theirs)


def test_threads_do_not_share_buffers():
    def there_and_back(rows):
        outputs = wire.decode_outputs(wire.encode_outputs(_outputs(rows)))
        return bool(outputs.outputs[0].new_logprobs.logprobs.shape == (rows, 21))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, [1 + n % 97 for n in range(400)]))


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", b"\x93\x01\x02\x03", b"hello", b"\xd9\x02\xff\xff"])
def test_rubbish_is_refused(rubbish):
    with pytest.raises(ValueError, match="EngineCoreRequest"):
        wire.decode_request(rubbish)
    with pytest.raises(ValueError, match="EngineCoreOutputs"):
        wire.decode_outputs(rubbish)
