"""Write deploy/grafana/*.json from boards.yaml; with --check, only check them."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.boards.grafana import to_json
from deploy.boards.model import boards

DEPLOY = Path(__file__).resolve().parents[1]
BOARDS = boards()


def files() -> dict[Path, str]:
    """Return the content of each file."""
    return {DEPLOY / "grafana" / f"{board.name}.json": to_json(board) for board in BOARDS}


def main(arguments: list[str]) -> int:
    wanted = files()
    if arguments == ["--check"]:
        there = set((DEPLOY / "grafana").glob("*.json"))
        stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
        for path in sorted([*stale, *(there - set(wanted))]):
            print(f"{path.relative_to(DEPLOY.parent)} is stale: run 'make dashboards'", file=sys.stderr)
        return 1 if stale or there - set(wanted) else 0
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
