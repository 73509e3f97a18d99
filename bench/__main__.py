"""`python -m bench [NAME [ARG ...]]`: one benchmark, or all and then docs/benchmarks.md."""

from __future__ import annotations

import importlib
import sys

from bench.names import ALONE, NAMES


def main() -> int:
    name, *rest = sys.argv[1:] or ["all"]
    if name in ("-h", "--help") or name not in (*NAMES, *ALONE, "all", "report"):
        names = " | ".join([*NAMES, *ALONE])
        print(f"usage: python -m bench [all | report | {names}] [--help]", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    for one in NAMES if name == "all" else [name]:
        print(f"== {one}", flush=True)
        sys.argv[1:] = [one, *rest]  # a result tells by which command it is taken again
        importlib.import_module(f"bench.{one.replace('-', '_')}").main(rest)
    if name == "all":
        importlib.import_module("bench.report").main([])
    return 0


if __name__ == "__main__":
    sys.exit(main())
