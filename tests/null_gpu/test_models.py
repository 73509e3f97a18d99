"""1P1D of several kinds of models on the null GPU: caches in groups, latents, windows, images."""

import asyncio

import pytest

from bench import gpu_models
from bench.gpu_fleet import serving
from tests.null_gpu.arms import START_S, TOKENS

NAMES = ["deepseek-v3", "gemma3", "gpt-oss", "qwen25-vl"]
PAIRS = [name + end for name in NAMES for end in (gpu_models.PAIR, gpu_models.DRAFTS)]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    kept = {}
    folder = tmp_path_factory.mktemp("models")
    with serving(folder, gpu_models.arms(NAMES), {}, 2 * START_S, **gpu_models.SECTIONS) as served:
        asyncio.run(gpu_models.compare(served, TOKENS, kept.update))
    return kept["models"]


@pytest.mark.parametrize("arm", PAIRS)
def test_a_pair_hands_over_every_prompt_and_gives_its_engines_tokens(arm, found):
    one = found[arm]
    assert one["equal"] == one["of"] == one["handoffs"]["loaded"]["shm"]
