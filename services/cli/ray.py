"""The commands `baton ray up`, `status`, `scale` and `down`: a deployment on a Ray cluster."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group

import baton
from baton import signals
from baton.addresses import split
from baton.services.cli.flags import operator_flags, warned
from baton.services.cli.help import SectionedCommand, command
from baton.services.cli.tables import UNLIMITED, Column, fitted
from baton.services.config import Settings
from baton.services.credentials import open_to_all
from baton.services.errors import ServiceError
from baton.services.fleet.signals import let_next_kill
from baton.services.leave import leave
from baton.services.printing import guard, say, step

if TYPE_CHECKING:
    from baton.services.ray.desk import Remote

app = typer.Typer(
    short_help="Run a deployment on a Ray cluster.",
    help="Run a deployment on a Ray cluster, or on a local one (docs/ray.md).",
    no_args_is_help=True,
)

_RUNNING = "host:port of a Ray cluster, or auto for the one that runs on this machine."
RunningAddress = Annotated[str, typer.Option("--address", help=_RUNNING)]


@app.command(cls=SectionedCommand)
def up(
    config: Annotated[Path, typer.Argument(help="YAML file: docs/ray.md.", metavar="CLUSTER.YAML")],
    address: Annotated[
        str, typer.Option(help=f"local: start Ray on this machine, for this command. Otherwise {_RUNNING}")
    ] = "local",
    log_dir: Annotated[
        str, typer.Option(help="Folder for the logs, with a subfolder for each node.", metavar="FOLDER")
    ] = "",
) -> None:
    """Run a deployment on a Ray cluster: scheduler, workers, routers. Ctrl-C ends all of it."""
    from baton.services.ray.config import read
    from baton.services.ray.deploy import deploy

    guard()
    settings = read(config)
    began, stop = time.monotonic(), threading.Event()

    def tell(name: str, text: str) -> None:
        say(step(time.monotonic() - began, name, text))

    say(f"Baton {baton.__version__} on Ray ({address}): model {settings.model}")
    _on_first_signal(stop)
    with deploy(settings, address=address, log_dir=log_dir, tell=tell, stop=stop) as deployment:
        _on_first_signal(stop)  # again, because Ray has set its own handler
        if not stop.is_set():
            say(_banner(settings, deployment.status()))
            deployment.wait(stop)
        say("\n  stopping after the running requests; Ctrl-C again kills everything at once")
    say("  stopped: nothing is left on the cluster")
    leave(0)


@command(app, "scheduler.topic")
def status(
    settings: Settings,
    address: RunningAddress = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the nodes, and the parts with their states."""
    with _running(address, settings) as deployment:
        _print_status(deployment.status(), as_json=json)


@command(app, "scheduler.topic")
def scale(
    settings: Settings,
    numbers: Annotated[
        list[str], typer.Argument(metavar="ROLE=NUMBER...", help="prefill=2, decode=1, encode=1, or several.")
    ],
    address: RunningAddress = "auto",
) -> None:
    """Set the numbers of workers; surplus ones are drained."""
    wanted = dict(_number(one) for one in numbers)
    with _running(address, settings) as deployment:
        deployment.scale(**wanted)
    print(f"ordered: {' '.join(numbers)}; `baton ray status` shows the progress")


@command(app, "scheduler.topic")
def down(settings: Settings, address: RunningAddress = "auto") -> None:
    """End a deployment and its `baton ray up`, after its running requests have finished."""
    with _running(address, settings) as deployment:
        deployment.down()
    print("ended: nothing is left on the cluster")


def _running(address: str, settings: Settings) -> AbstractContextManager[Remote]:
    from baton.services.ray.desk import Remote

    return Remote.connect(address, settings.scheduler.topic)


def _number(text: str) -> tuple[str, int]:
    from baton.services.ray.config import WORKER_ROLES

    role, _, number = text.partition("=")
    if role not in WORKER_ROLES or not number.isdecimal():
        raise ServiceError(f"{text!r} is not ROLE=NUMBER, with role {' or '.join(WORKER_ROLES)}")
    return role, int(number)


def _on_first_signal(stop: threading.Event) -> None:
    """Set `stop` on SIGINT, SIGTERM and SIGHUP; a second SIGINT or SIGTERM kills this process.

    Ray then kills its actors.
    """

    def on_signal(number: int, frame: object) -> None:
        del frame
        if number in signals.HURRYING:
            let_next_kill()
        stop.set()

    for number in signals.ending():
        signal.signal(number, on_signal)


def _banner(settings: Settings, status: dict[str, Any]) -> str:
    url, model = status["urls"][0], status["model"]
    numbers = "baton ray scale prefill=2 decode=1"
    if status["autoscale"] == "on":
        limits = ", ".join(
            f"{least} to {most} {role}"
            for role, (least, most) in status["bounds"].items()
            if role != "encode"
        )
        numbers = f"chosen by the scheduler: {limits}"
    return f"""
Ready. OpenAI's API is served at {" and ".join(f"{one}/v1" for one in status["urls"])}

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

  nodes and parts:      baton ray status
  requests and load:    baton status --scheduler {status["scheduler"]}{operator_flags(settings)}
  more, fewer workers:  {numbers}
  stop:                 Ctrl-C, or baton ray down
{warned(open_to_all(settings.router, split(url.removeprefix("http://"))[0]))}"""


def _print_status(status: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=2))
        return
    wanted = ", ".join(
        f"{number} {role}" for role, number in status["wanted"].items() if number or role != "encode"
    )
    who = " (chosen by the scheduler)" if status["autoscale"] == "on" else ""
    head = (
        f"model {status['model']}, topic {status['topic']}, wanted{who}: {wanted}\n"
        f"scheduler {status['scheduler']}, routers: {', '.join(status['urls']) or 'none'}\n"
    )
    parts = fitted("parts", _PARTS, status["parts"], UNLIMITED)
    nodes = fitted("nodes", _NODES, status["nodes"], UNLIMITED)
    Console(width=UNLIMITED, highlight=False).print(Group(head, parts, nodes))


_PARTS: list[Column[dict[str, Any]]] = [
    Column("part", lambda part: part["name"]),
    Column("role", lambda part: part["role"]),
    Column("state", lambda part: part["state"]),
    Column("node", lambda part: part["node"] or "-"),
]
_NODES: list[Column[dict[str, Any]]] = [
    Column("node", lambda node: node["name"]),
    Column("address", lambda node: node["address"]),
    Column("Ray's id", lambda node: node["id"]),
]
