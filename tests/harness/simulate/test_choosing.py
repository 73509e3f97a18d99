"""Cells that compare routers which choose with today's booking: their traces, and what is kept of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from harness.simulate.choosing import SECONDS, measure, table, trace_of


def test_requests_of_two_classes_come_in_the_order_of_time() -> None:
    asks = list(trace_of("classes", 4, 10.0, 0).begin())
    assert asks == sorted(asks, key=lambda ask: ask.at)
    names = [ask.service.name for ask in asks]
    assert names.count("batch") > 2 * names.count("interactive") > 20


@pytest.mark.parametrize("name", SECONDS)
def test_a_trace_is_the_same_for_each_arm(name: str) -> None:
    one, other, third = (list(trace_of(name, 2, 8.0, seed).begin()) for seed in (0, 0, 1))
    assert one
    assert one == other
    assert one != third


def test_each_cell_is_run_once_and_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cells.jsonl"
    cells = {"pairs": 1, "routers": [2], "traces": ["prompts"], "arms": ["today", "chosen"], "seeds": [0, 1]}
    measure(argparse.Namespace(file=file, **{**cells, "seeds": [0]}))
    first = file.read_text()
    measure(argparse.Namespace(file=file, **cells))
    assert file.read_text().startswith(first)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (arm, seed) for seed in (0, 1) for arm in ("today", "chosen")
    ]
    assert all(row["requests"] == len(row["within"]) == len(row["first_ms"]) > 20 for row in rows)
    capsys.readouterr()
    table(argparse.Namespace(file=file))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[3:5] for line in lines[2:]] == [["today", "2"], ["chosen", "2"]]
