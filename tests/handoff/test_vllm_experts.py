"""Mixtures of experts whose ranks have experts of their own hand over, to each other and to one rank."""

import random

import pytest

from harness.architectures.experts import glm4_moe
from harness.engines import EngineProcess, Options, decode, generate, prefill

WRITTEN = 12
ALONE = {"enable_prefix_caching": False}
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "distributed_executor_backend": "mp"}

pytestmark = pytest.mark.timeout(300)


def test_expert_parallel_ranks_hand_over_and_take(tmp_path):
    model = tmp_path / "glm4"
    glm4_moe(model)
    wide = Options(model, "wide", cores="0|1", engine=ALONE | EXPERTS)
    with EngineProcess(Options(model, "plain", engine=ALONE)) as plain, EngineProcess(wide) as experts:
        for number, (source, target) in enumerate(((plain, experts), (experts, plain), (experts, experts))):
            prompt = random.Random(number).choices(range(2, 300), k=100)
            expected = plain.call(generate, f"alone-{number}", prompt, WRITTEN)
            read = source.call(prefill, f"r{number}", prompt)
            assert read.saved.manifest is not None, read.saved.problem
            written = target.call(decode, f"r{number}", prompt, WRITTEN, read.saved.manifest)
            assert written.loaded.problem is None
            assert written.tokens == expected
