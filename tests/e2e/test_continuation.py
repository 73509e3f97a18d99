"""Failures of a worker in the middle of an answer: whatever features a client uses, nothing changes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from harness.continuation import Comparison, Site, site
from harness.features import FEATURES, Feature
from harness.support import CALL_S

# `python -m harness.continuation` tests twenty answers of each feature, and every position.
ANSWERS = 1
EVERY = 40


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("continuation") / "site") as one:
        yield one


@pytest.mark.timeout(300)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
async def test_goes_on(where: Site, feature: Feature) -> None:
    async with httpx.AsyncClient(base_url=where.url, timeout=CALL_S) as client:
        score = await Comparison(where, client, EVERY).score(feature, range(ANSWERS))
    print(score)
    assert not score.wrong, score
    assert score.equal == score.tried > 1
