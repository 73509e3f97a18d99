"""`python -m bench [NAME [ARG ...]]`: one benchmark, or all and then the table in docs/benchmarks.md."""

from __future__ import annotations

import importlib
import sys

# In the order in which `make bench` runs them.
NAMES = [
    "scheduler",
    "handoff",
    "wire",
    "proposers",
    "path",
    "router",
    "disaggregation",
    "speculation",
    "startup",
]


def main() -> int:
    name, *rest = sys.argv[1:] or ["all"]
    if name in ("-h", "--help") or name not in (*NAMES, "all", "report"):
        print(f"usage: python -m bench [all | report | {' | '.join(NAMES)}] [--help]", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    for one in NAMES if name == "all" else [name]:
        print(f"== {one}", flush=True)
        importlib.import_module(f"bench.{one}").main(rest)
    if name == "all":
        importlib.import_module("bench.report").main([])
    return 0


if __name__ == "__main__":
    sys.exit(main())
