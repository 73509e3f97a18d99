"""The command `baton`: each sub-command runs a process of a deployment, or queries a running one."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from typing import Annotated, Literal

import typer

import baton
from baton.errors import BatonError
from baton.services import printing
from baton.services.cli import ca, metrics
from baton.services.cli import doctor as diagnosis
from baton.services.cli.batch import batch
from baton.services.cli.flags import Of
from baton.services.cli.help import SectionedCommand, command
from baton.services.cli.key import keys
from baton.services.cli.operators import OPERATORS, addresses_of, become_operator
from baton.services.cli.ray import app as ray
from baton.services.cli.title import hide_secrets
from baton.services.cli.tune import simulated_splits
from baton.services.config import Settings
from baton.services.engine.args import VLLM_VERSION
from baton.services.leave import leave
from baton.services.models import models_of

INTERRUPTED = 130  # exit status
_UNPRINTABLE = {errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EDQUOT}

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on separate workers.\n\n"
    "`baton up` runs a whole deployment on this machine; other commands run one process of it each. "
    "Every flag can also be set in the environment (BATON_SECTION__KEY) or in a YAML file (--config).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's tables truncate long flag names
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"baton {baton.__version__} (vLLM {VLLM_VERSION})")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print Baton's and vLLM's versions.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version


WorkerId = Annotated[
    str,
    typer.Argument(
        metavar="WORKER", help="The worker's name or id, a unique prefix of it, or a gang's name."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@command(
    app,
    *("engine", "router", "scheduler", "worker.listen", "handoff", "security", "autoscale", "slo", "ops"),
    "fleet",
)
def up(
    settings: Settings,
    *,
    prefill: Annotated[
        int | None, typer.Option(help="Number of prefill workers. [default: 1 unless --mixed]", min=0)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Number of decode workers. [default: 1 unless --mixed]", min=0)
    ] = None,
    mixed: Annotated[
        int, typer.Option(help="Number of mixed workers, which do both: the aggregated mode.", min=0)
    ] = 0,
    encode: Annotated[int, typer.Option(help="Number of encode workers (docs/images.md).", min=0)] = 0,
    schedulers: Annotated[
        int,
        typer.Option(
            help="Number of schedulers, which share the requests; more than one needs scheduler.store to be "
            "Redis. They listen on consecutive ports from scheduler.address on, or on its addresses.",
            min=1,
        ),
    ] = 1,
    log_dir: Annotated[str, typer.Option(help="Folder for the processes' logs.", metavar="FOLDER")] = "",
) -> None:
    """Run a deployment on this machine: scheduler, workers, router. Ctrl-C ends it."""
    from baton.services.cli.up import run_up
    from baton.services.fleet.supervisor import Fleet

    printing.guard()
    given = (prefill, decode, mixed, schedulers, encode)
    run_up(settings, Fleet.of(*given) if given != (None, None, 0, 1, 0) else None, log_dir)


app.command(cls=SectionedCommand)(batch)
app.command("tune", cls=SectionedCommand)(simulated_splits)
app.add_typer(keys)
app.add_typer(ca.app)
app.add_typer(diagnosis.app)
app.add_typer(metrics.app)
app.add_typer(ray, name="ray")


@command(app, "engine", "router", "scheduler", "security", "ops")
def router(settings: Settings) -> None:
    """Run a router: serve OpenAI's HTTP API. Needs no GPU and no weights."""
    from baton.services.fleet.routers import run_routers

    printing.guard()
    run_routers(settings)
    leave(0)


@command(app, "scheduler", "security", "autoscale", "slo", of=Of.ONE)
def scheduler(settings: Settings) -> None:
    """Run a scheduler: track the workers and place every request."""
    from baton.services.fleet.scheduler import run_scheduler

    printing.guard()
    run_scheduler(settings)


@command(app, "engine", "worker", "scheduler", "handoff", "security", of=Of.ONE)
def prefill(settings: Settings) -> None:
    """Run a prefill worker: prefill prompts, hand over their KV."""
    _run_worker(settings, "prefill")


@command(app, "engine", "worker", "scheduler", "handoff", "security", of=Of.ONE)
def decode(settings: Settings) -> None:
    """Run a decode worker: load the KV and generate the output."""
    _run_worker(settings, "decode")


@command(app, "engine", "worker", "scheduler", "handoff", "security", of=Of.ONE)
def mixed(settings: Settings) -> None:
    """Run a worker that does both: the aggregated mode."""
    _run_worker(settings, "mixed")


@command(app, "engine", "worker", "scheduler", "handoff", "security", of=Of.ONE)
def encode(settings: Settings) -> None:
    """Run an encode worker: compute images for other workers."""
    _run_worker(settings, "encode")


@command(app, "engine", "worker", "scheduler", "handoff", "security", "fleet", of=Of.ONE)
def node(
    settings: Settings,
    *,
    prefill: Annotated[int, typer.Option(help="Number of prefill workers.", min=0)] = 0,
    decode: Annotated[int, typer.Option(help="Number of decode workers.", min=0)] = 0,
    mixed: Annotated[int, typer.Option(help="Number of mixed workers.", min=0)] = 0,
    encode: Annotated[int, typer.Option(help="Number of encode workers.", min=0)] = 0,
    orders: Annotated[
        bool, typer.Option("--orders", help="Read lists of parts from stdin (services/fleet/node.py).")
    ] = False,
    log_dir: Annotated[str, typer.Option(help="Folder for the processes' logs.", metavar="FOLDER")] = "",
) -> None:
    """Run this machine's workers of a larger deployment.

    Imports vLLM once, and restarts processes that die.
    """
    from baton.services.cli.node import run
    from baton.services.fleet.supervisor import Fleet

    printing.guard()
    fleet = Fleet(prefill=prefill, decode=decode, mixed=mixed, encode=encode)
    run(settings, fleet, log_dir, orders=orders)


@command(app, *OPERATORS, of=Of.ANY)
def status(
    settings: Settings,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second, until Ctrl-C.")] = False,
) -> None:
    """Show the workers, their load and the last requests."""
    from baton.services.cli.status import run_status

    become_operator(settings)
    run_status(addresses_of(settings), as_json=json, watch=watch)


@command(app, *OPERATORS, of=Of.ONE)
def drain(settings: Settings, worker: WorkerId) -> None:
    """Drain a worker: it finishes its requests and exits.

    It takes no new requests. Restarted under the same name, it stays drained until `baton undrain`.
    """
    _act(settings, "drain", worker)


@command(app, *OPERATORS, of=Of.ONE)
def undrain(
    settings: Settings,
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="Its name or id, or a unique prefix of either.")
    ],
) -> None:
    """Let a drained worker take requests again."""
    _act(settings, "undrain", worker)


@command(app, *OPERATORS, of=Of.ONE)
def role(
    settings: Settings,
    worker: WorkerId,
    to: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or mixed.")],
) -> None:
    """Change a worker's role without a restart.

    Running requests finish in the old role; requests placed from now on use the new one.
    """
    _act(settings, "role", worker, to)


@command(app, *OPERATORS, of=Of.ANY, name="log-level")
def log_level(
    settings: Settings,
    process: Annotated[
        str,
        typer.Argument(
            metavar="PROCESS",
            help="scheduler, routers, workers, all, or the id of a worker or router, or a prefix of it.",
        ),
    ],
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="debug, info, warning or error.")],
) -> None:
    """Change the log level of running processes, until they exit."""
    from baton.services.cli.status import run_log_level

    become_operator(settings)
    run_log_level(list(addresses_of(settings).values()), process, level.lower())


@command(app, *OPERATORS, of=Of.ANY)
def top(settings: Settings) -> None:
    """Show the deployment live, and act on its workers.

    For scripts use `baton status`.
    """
    from baton.services.cli.status import describe_all
    from baton.services.top.app import Top  # late: imports textual

    become_operator(settings)
    addresses = addresses_of(settings)
    describe_all(addresses)  # raises, before a screen is opened, if no scheduler answers
    Top(addresses).run()


@command(app, "engine", "router", "scheduler", "worker", "handoff", "security", of=Of.ANY)
def doctor(settings: Settings, json: Json = False) -> None:
    """Check this machine and the deployment, and say what to fix.

    The deployment is checked only if its scheduler answers. Exit status: 1 if something is wrong.
    """
    diagnosis.run_doctor(models_of(settings), as_json=json)


def _act(settings: Settings, kind: Literal["drain", "undrain", "role"], worker: str, role: str = "") -> None:
    from baton.services.cli.status import run_action

    become_operator(settings)
    run_action(settings.scheduler.address, kind, worker, role)


def _run_worker(settings: Settings, role: str) -> None:
    from baton.services.worker.lifecycle import run_worker

    printing.guard()
    run_worker(settings, role)


def main() -> None:
    """Run the command line. Expected errors print one line and exit with status 1, without a traceback."""
    printing.open_streams()
    hide_secrets(sys.argv[1:])
    # A script's shell starts background commands (`&`) with SIGINT ignored, and Python would keep that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # so that a full disk is reported below
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 (the error must be the last line printed)
        printing.complain(_words(error))
        leave(1)  # libraries print at exit, which would bury the message


def _words(error: Exception) -> str:
    if isinstance(error, BatonError):
        return f"baton: error: {error}"
    if isinstance(error, OSError) and error.errno in _UNPRINTABLE and error.filename is None:
        return f"baton: error: cannot print: {error.strerror}"
    return "".join(traceback.format_exception(error)).rstrip()


if __name__ == "__main__":
    main()
