"""The rules of deploy/prometheus/rules.yaml, for tests and measurements of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).resolve().parents[1] / "prometheus" / "rules.yaml"
RUNBOOKS = "docs/runbooks"
EVERY_S = 5  # between two looks at the rules, and two scrapes


@dataclass(frozen=True)
class Rule:
    """An alert, or a rate that is computed once."""

    name: str
    expr: str


_GROUPS = yaml.safe_load(FILE.read_text())["groups"]
RECORDS, ALERTS = (
    [Rule(rule[kind], rule["expr"]) for group in _GROUPS for rule in group["rules"] if kind in rule]
    for kind in ("record", "alert")
)
