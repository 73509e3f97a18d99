"""`baton`: the one command. Each sub-command is a process of a cluster, or a question to a running one."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Literal

import typer

import baton
from baton.errors import BatonError
from baton.services.cli.batch import batch
from baton.services.cli.flags import with_settings
from baton.services.config import Settings

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on separate workers.\n\n"
    "`baton up` runs everything on this machine; the other commands are its parts, one process each. "
    "Every flag can also be set in the environment or in a YAML file (--config).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut long flag names short
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
@with_settings("engine", "router", "scheduler", "handoff")
def up(
    settings: Settings,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers. [default: 1 unless --mixed]", min=0)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode workers. [default: 1 unless --mixed]", min=0)
    ] = None,
    mixed: Annotated[int, typer.Option(help="Workers that do both: the aggregated mode.", min=0)] = 0,
    log_dir: Annotated[str, typer.Option(help="Where each process's log goes.", metavar="FOLDER")] = "",
) -> None:
    """Run everything on this machine: scheduler, workers, router. Ctrl-C ends it all."""
    from baton.services.cli.supervisor import Fleet
    from baton.services.cli.up import run_up

    alone = 0 if mixed else 1
    fleet = Fleet(
        prefill=alone if prefill is None else prefill,
        decode=alone if decode is None else decode,
        mixed=mixed,
    )
    run_up(settings, fleet, log_dir)


app.command()(batch)


@app.command()
@with_settings("engine", "router", "scheduler")
def router(settings: Settings) -> None:
    """Run a router: OpenAI's HTTP API in, tokens out. Needs no GPU and no weights."""
    from baton.services.leave import leave
    from baton.services.router.app import run_router

    run_router(settings)
    leave(0)


@app.command()
@with_settings("scheduler")
def scheduler(settings: Settings) -> None:
    """Run a scheduler: the registry of workers, and the placement of every request."""
    from baton.services.cli.scheduler import run_scheduler

    run_scheduler(settings)


@app.command()
@with_settings("engine", "worker", "scheduler", "handoff")
def prefill(settings: Settings) -> None:
    """Run a prefill worker: reads prompts, hands their KV cache over."""
    _run_worker(settings, "prefill")


@app.command()
@with_settings("engine", "worker", "scheduler", "handoff")
def decode(settings: Settings) -> None:
    """Run a decode worker: pulls the KV cache, writes the answers."""
    _run_worker(settings, "decode")


@app.command()
@with_settings("engine", "worker", "scheduler", "handoff")
def mixed(settings: Settings) -> None:
    """Run a worker that does both: the aggregated mode."""
    _run_worker(settings, "mixed")


@app.command()
@with_settings("scheduler")
def status(
    settings: Settings,
    json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the workers, their load, the placements under way and the last handoffs."""
    from baton.services.cli.status import run_status

    run_status(settings.scheduler, as_json=json, watch=watch)


@app.command()
@with_settings("scheduler")
def drain(
    settings: Settings,
    worker: Annotated[str, typer.Argument(help="The worker's id, or a beginning of it that is unique.")],
) -> None:
    """Ask a worker to finish what it has, take nothing new, and exit."""
    from baton.services.cli.status import run_drain

    run_drain(settings.scheduler, worker)


@app.command()
@with_settings("scheduler")
def role(
    settings: Settings,
    worker: Annotated[str, typer.Argument(help="The worker's id, or a beginning of it that is unique.")],
    to: Annotated[Literal["prefill", "decode", "mixed"], typer.Argument(help="What it shall do.")],
) -> None:
    """Give a worker another role, without a restart: what it runs goes on, other work is placed on it."""
    from baton.services.cli.status import run_role

    run_role(settings.scheduler, worker, to)


@app.command()
def version() -> None:
    """Print Baton's version and the engine's that it is made for."""
    from baton.services.vllm_args import VLLM_VERSION

    print(f"baton {baton.__version__} (vLLM {VLLM_VERSION})")


def _run_worker(settings: Settings, role: str) -> None:
    from baton.services.worker.lifecycle import run_worker

    run_worker(settings, role)


def main() -> None:
    """The entry point: an expected error is one line on stderr and status 1, never a traceback."""
    # A script's shell starts what is behind `&` with SIGINT ignored, and Python would leave it at that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        app()
    except BatonError as error:
        print(f"baton: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
