"""A worker fails in the middle of an answer: the answer does not change, whatever features it uses."""

import asyncio
import os

import httpx
import pytest

from harness.architectures.registry import ARCHITECTURES
from harness.continuation import Comparison, site
from harness.features import ANSWERS, FEATURES, of_prompts
from harness.support import CALL_S

# EVERY_POSITION=1 tests twenty answers of each feature at every position, for an hour or more.
WHOLE = "EVERY_POSITION" in os.environ
ANSWERS_EACH, EVERY = (ANSWERS, 1) if WHOLE else (1, 40)
KEEPS_OTHERWISE = ("eagle3-gpt-oss", "mtp-qwen3-next")  # sliding windows; linear attention


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    with site(tmp_path_factory.mktemp("continuation") / "site") as one:
        yield one


@pytest.fixture(scope="module")
def found(where):
    """Compare all features at the same time and return the scores by name."""

    async def compare():
        async with httpx.AsyncClient(base_url=where.url, timeout=CALL_S) as client:
            comparison = Comparison(where, client, EVERY)
            comparing = (comparison.score(feature, range(ANSWERS_EACH)) for feature in FEATURES)
            return await asyncio.gather(*comparing, return_exceptions=True)

    return dict(zip((feature.name for feature in FEATURES), asyncio.run(compare()), strict=True))


@pytest.mark.timeout(7200 if WHOLE else 300)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_answers_continue(found, feature):
    score = found[feature.name]
    print(score)
    if isinstance(score, BaseException):
        raise score
    assert not score.wrong, score
    assert score.equal == score.tried > 1


@pytest.mark.timeout(600)
@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="three engines each: WHOLE_TABLE=1")
@pytest.mark.parametrize("name", KEEPS_OTHERWISE)
async def test_answers_continue_where_layers_keep_different_things(name, tmp_path):
    """Fail at every position. tests/handoff/test_vllm_groups.py tests the same inside one engine."""
    model = ARCHITECTURES[name]
    features = of_prompts(model.prompts(2))
    with site(tmp_path / "site", architecture=model) as where:
        async with httpx.AsyncClient(base_url=where.url, timeout=CALL_S) as client:
            comparison = Comparison(where, client, plain=features[0])
            done = [await comparison.score(feature, range(2)) for feature in features]
    assert [score.wrong for score in done] == [[], [], []]
    assert all(score.equal == score.tried > 20 for score in done)
