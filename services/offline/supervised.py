"""The process that runs a deployment for another Python process; started by deployment.py, never by hand.

It is a separate process because a supervisor forks engines, which is not safe in a process that has threads
or has used a GPU. It stops on SIGTERM or when its owner dies, which a pidfd reports. (PR_SET_PDEATHSIG would
report the end of the thread that started it.) stdin: one JSON object, `Order`. stderr: its log. stdout:
a JSON line for each event: those of `supervise`, or "failed" (kind, text).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.errors import BatonError
from baton.services.config import REVEAL, Settings
from baton.services.fleet.supervisor import Fleet, supervise
from baton.services.leave import leave
from baton.services.printing import complain, guard, put


@dataclass(frozen=True)
class Order:
    """The deployment to run, and its owner."""

    owner: int  # process id; must be the parent
    settings: dict[str, Any]  # the whole tree
    fleet: dict[str, int]  # Fleet's fields
    log_dir: str

    @classmethod
    def of(cls, settings: Settings, fleet: Fleet, log_dir: Path) -> Order:
        return cls(os.getpid(), settings.model_dump(mode="json", context=REVEAL), asdict(fleet), str(log_dir))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    """Run the deployment ordered on stdin until SIGTERM or the owner's death."""
    order = Order(**json.load(sys.stdin))
    owner = os.pidfd_open(order.owner)
    if os.getppid() != order.owner:  # the owner died before the line above, and its pid may have been reused
        leave(1)
    # Keep libraries' output out of the events.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    guard()

    def tell(event: dict[str, Any]) -> None:
        put(events, json.dumps(event) + "\n")

    try:
        supervise(Settings(**order.settings), Fleet(**order.fleet), order.log_dir, tell, owner)
    except BatonError as error:
        tell({"event": "failed", "kind": type(error).__name__, "text": str(error)})
        leave(1)
    except Exception as error:  # noqa: BLE001 (it is sent to the owner)
        complain("".join(traceback.format_exception(error)).rstrip())
        tell({"event": "failed", "kind": "StartError", "text": f"{type(error).__name__}: {error}"})
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
