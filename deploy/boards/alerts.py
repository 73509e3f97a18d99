"""The rules in deploy/prometheus/rules.yaml, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).resolve().parents[1] / "prometheus" / "rules.yaml"
RUNBOOKS = "docs/runbooks"
EVERY_S = 5  # interval of scrapes and of evaluations


@dataclass(frozen=True)
class Rule:
    """An alert or a recording rule."""

    name: str
    expr: str
    for_s: int = 0
    severity: str = ""
    summary: str = ""


def _rules(kind: str) -> list[Rule]:
    found = []
    for group in yaml.safe_load(FILE.read_text())["groups"]:
        for one in (rule for rule in group["rules"] if kind in rule):
            labels, texts = one.get("labels", {}), one.get("annotations", {})
            for_s = int(one.get("for", "0s").removesuffix("s"))
            severity, summary = labels.get("severity", ""), texts.get("summary", "")
            found.append(Rule(one[kind], one["expr"], for_s, severity, summary))
    return found


RECORDS, ALERTS = _rules("record"), _rules("alert")
