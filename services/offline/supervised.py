"""The process that runs a deployment for another Python process; started by deployment.py, never by hand.

A process of its own, as a supervisor forks engines: in a process with threads, or one that has used a GPU,
that is not safe. It ends, and all of its processes with it, when it gets SIGTERM or when its owner is gone,
however that died: the owner is watched by a pidfd. (PR_SET_PDEATHSIG would tell of the end of the thread
that started it, which in a notebook or a pool is not the end of the process.)

stdin: one JSON object, `Order`. stderr: its log. stdout: one line of JSON an event, named by "event":
"step" (since_start_s, name, text), "ready", "ended", and "failed" (kind, text).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from baton.errors import BatonError
from baton.services.config import REVEAL, Settings
from baton.services.fleet.supervisor import Fleet, supervise
from baton.services.leave import leave


@dataclass(frozen=True)
class Order:
    """What to run, and for whom."""

    owner: int  # process id; must be the parent
    settings: dict[str, Any]  # the whole tree
    fleet: dict[str, int]  # Fleet's fields
    log_dir: str

    @classmethod
    def of(cls, settings: Settings, fleet: Fleet, log_dir: Path) -> Order:
        return cls(os.getpid(), settings.model_dump(mode="json", context=REVEAL), asdict(fleet), str(log_dir))

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class _Events:
    """The supervisor's Report, as lines of JSON. An owner that is gone needs none."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def send(self, event: str, **fields: Any) -> None:
        with suppress(BrokenPipeError):
            self._out.write(json.dumps({"event": event, **fields}) + "\n")
            self._out.flush()

    def begun(self, log_dir: Path) -> None:
        del log_dir  # it was the owner's choice

    def step(self, since_start_s: float, name: str, text: str) -> None:
        self.send("step", since_start_s=since_start_s, name=name, text=text)

    def ready(self) -> None:
        self.send("ready")

    def ending(self, drain_s: float) -> None:
        """The owner knows: it asked, or it will hear why."""
        del drain_s

    def ended(self) -> None:
        self.send("ended")


def main() -> None:
    """Run the deployment that stdin orders until nobody wants it any more."""
    order = Order(**json.load(sys.stdin))
    owner = os.pidfd_open(order.owner)
    if os.getppid() != order.owner:  # it died before the line above, and its number may be another's now
        leave(1)
    # What libraries print must not get between the events.
    events = _Events(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    try:
        supervise(Settings(**order.settings), Fleet(**order.fleet), order.log_dir, events, owner)
    except BatonError as error:
        events.send("failed", kind=type(error).__name__, text=str(error))
        leave(1)
    except Exception as error:  # noqa: BLE001 (the owner must hear of it, whatever it is)
        traceback.print_exc()
        events.send("failed", kind="StartError", text=f"{type(error).__name__}: {error}")
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
