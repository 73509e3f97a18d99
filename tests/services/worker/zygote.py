"""A process that imports vLLM once and forks workers: a start takes seconds, as under `baton up`.

Reads commands as JSON lines from stdin and answers each with one line on stdout.
    {"start": name, "role": role, "settings": {...}, "log_dir": folder}  ->  {"pid": n, "log": path}
    {"exitcode": pid}  ->  {"exitcode": n or null}
Ends, and its workers with it, when stdin does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from baton.services.cli import processes
from baton.services.config import Settings
from baton.services.worker import lifecycle


def main() -> None:
    began = time.monotonic()
    lifecycle.preload()
    print(json.dumps({"preloaded_s": time.monotonic() - began}), flush=True)
    children: dict[int, processes.Child] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            child = processes.spawn(command["start"], _run(command), Path(command["log_dir"]))
            children[child.process.pid or 0] = child
            answer: dict[str, Any] = {"pid": child.process.pid, "log": str(child.log)}
        else:
            answer = {"exitcode": children[command["exitcode"]].process.exitcode}
        print(json.dumps(answer), flush=True)
    processes.stop_all(list(children.values()), 1.0)


def _run(command: dict[str, Any]) -> Any:
    return lambda: lifecycle.run_worker(Settings(**command["settings"]), command["role"])


if __name__ == "__main__":
    main()
