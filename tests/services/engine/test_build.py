"""The cores that an engine gets."""

from __future__ import annotations

import os
import warnings

import pytest

from baton.services.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from baton.services.engine.build import cores_of_ranks, parse_cores

OURS = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cores"), [("0", [0]), ("0-1", [0, 1]), ("1,0", [0, 1]), ("0-0,1", [0, 1]), ("0,0", [0])]
)
def test_cores_are_read(text: str, cores: list[int]) -> None:
    if set(cores) <= set(OURS):
        assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "2-1", "0;1", "99999"])
def test_what_is_no_core_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"worker\.cpu"):
        parse_cores(text)


def test_ranks_share_the_cores_evenly() -> None:
    shares = [share.split(",") for share in cores_of_ranks("", len(OURS)).split("|")]
    assert [int(core) for (core,) in shares] == OURS
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        cores_of_ranks(str(OURS[0]), 2)
