import asyncio
import contextlib
import time

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsTensors

from baton.services.engine.step_checks import StepLimits
from baton.services.router.errors import Unsupported
from baton.services.router.vllm import logprobs
from baton.services.router.vllm.engine_client import RefusedByRouter
from baton.services.router.vllm.logprobs import MOST_AT_A_TOKEN, MOST_OF_A_PROMPT, PromptLogprobs
from harness.fake_worker import until
from tests.services.router.vllm.test_large_answers import longest_turn

VOCABULARY = 32_000


@pytest.mark.parametrize(
    ("params", "each", "of_prompt"),
    [
        ({}, 0, 0),
        ({"logprobs": 0}, 1, 0),
        ({"logprobs": 20}, 21, 0),
        ({"logprobs": -1}, VOCABULARY + 1, 0),
        ({"logprob_token_ids": [5, 6, 7]}, 4, 0),
        ({"prompt_logprobs": 2}, 0, 300),
        ({"prompt_logprobs": -1}, 0, (VOCABULARY + 1) * 100),
        ({"prompt_logprob_token_ids": [[1, 2], [3, 4]]}, 0, 4),
    ],
)
def test_kept_log_probabilities_are_counted(params, each, of_prompt):
    asked = SamplingParams(**params)
    assert logprobs.at_a_token(asked, VOCABULARY) == each
    assert logprobs.of_the_prompt(asked, VOCABULARY, 100) == of_prompt


@pytest.mark.parametrize(
    ("params", "prompt_tokens", "named"),
    [
        ({"logprobs": -1}, 10, "top_logprobs"),
        ({"logprobs": MOST_AT_A_TOKEN}, 10, str(MOST_AT_A_TOKEN)),
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 20}, MOST_OF_A_PROMPT // 20, str(MOST_OF_A_PROMPT)),
        ({"logprobs": 20, "prompt_logprobs": 20}, 12_000, ""),  # as evaluations need
        ({"prompt_logprobs": 1}, 128 << 10, ""),
    ],
)
def test_too_many_are_refused(params, prompt_tokens, named):
    with pytest.raises(Unsupported, match=named) if named else contextlib.nullcontext():
        logprobs.check(SamplingParams(**params), VOCABULARY, prompt_tokens)


async def test_the_whole_vocabulary_is_refused_before_placement(cluster):
    cluster.remake(steps=StepLimits(VOCABULARY))
    prefill, decode = await cluster.pair()
    with pytest.raises(RefusedByRouter, match="log-probabilities of its prompt") as refused:
        await cluster.send("q", [1] * 400, 1, prompt_logprobs=-1)
    assert refused.value.http_status == 400
    assert not prefill.seen.starts
    assert not decode.seen.starts


def rows(count, width):
    ids = torch.arange(count * width, dtype=torch.int32).reshape(count, width)
    return LogprobsTensors(ids, -ids.float(), torch.ones(count, dtype=torch.int32))


class FrontEnd:
    """Takes outputs, and rows in as much CPU time as vLLM's front end."""

    def __init__(self, entry_s=2e-05):
        self.entry_s = entry_s
        self.ids = []
        self.outputs = []
        self.failed = []
        self.making = PromptLogprobs(self.outputs.append, lambda _, error: self.failed.append(error))
        self.making.add = self.add

    def add(self, request_id, some):
        assert request_id == "q"
        until = time.thread_time() + self.entry_s * some.logprobs.numel()
        while time.thread_time() < until:
            pass
        self.ids += some.logprob_token_ids.flatten().tolist()


def output(tokens, some=None, name="q"):
    return EngineCoreOutput(request_id=name, new_token_ids=tokens, new_prompt_logprobs_tensors=some)


async def test_many_log_probabilities_do_not_block_other_streams():
    end = FrontEnd()
    first, second = output([1], rows(2000, 5)), output([2])
    assert end.making.takes(first)
    assert end.making.takes(second)
    assert not end.making.takes(output([3], name="another"))
    longest = await longest_turn(lambda: bool(end.outputs))
    assert (end.ids, end.outputs) == (list(range(10_000)), [first, second])
    assert first.new_prompt_logprobs_tensors is None
    assert not end.making.takes(output([4]))
    assert longest < 0.1  # 0.2 s in one go


async def test_log_probabilities_of_many_prompts_do_not_block_either():
    end = FrontEnd(entry_s=100e-6)
    names = [f"q{number}" for number in range(20)]
    end.making.add = lambda _, some: FrontEnd.add(end, "q", some)
    for name in names:
        assert end.making.takes(output([1], rows(50, 5), name))
    longest = await longest_turn(lambda: len(end.outputs) == len(names))
    assert [one.request_id for one in end.outputs] == names
    assert longest < 0.2  # 0.5 s in one go


async def test_a_finished_request_gets_no_more():
    end = FrontEnd()
    assert end.making.takes(output([1], rows(2000, 5)))
    await asyncio.sleep(0)
    end.making.drop("q")
    made = len(end.ids)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(end.ids) == made < 10_000
    assert not end.outputs
    assert not end.failed


async def test_an_error_of_vllms_ends_only_that_request():
    end = FrontEnd()

    def add(*_):
        raise OverflowError("no such token")

    end.making.add = add
    assert end.making.takes(output([1], rows(2000, 5)))
    await until(lambda: bool(end.failed), "its request has failed")
    assert not end.outputs
    assert not end.making.takes(output([2]))
