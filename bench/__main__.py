"""`python -m bench [NAME [ARG ...]]`: one bench, or all and then docs/benchmarks.md."""

from __future__ import annotations

import importlib
import sys

from bench.names import ALONE, NAMES


def main() -> int:
    name, *rest = sys.argv[1:] or ["all"]
    name = name.replace("_", "-")
    if name in ("-h", "--help") or name not in (*NAMES, *ALONE, "all", "report"):
        print(
            f"usage: python -m bench [all | report | {' | '.join([*NAMES, *ALONE])}] [--help]",
            file=sys.stderr,
        )
        return 0 if name in ("-h", "--help") else 2
    for one in [*NAMES, "report"] if name == "all" else [name]:
        print(f"== {one}", flush=True)
        sys.argv[1:] = [one, *rest]  # results name the command that measures them
        importlib.import_module(f"bench.{one.replace('-', '_')}").main(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
