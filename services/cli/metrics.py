"""The command `baton metrics`: where a deployment's processes serve their metrics."""

from __future__ import annotations

import json

import typer

from baton.services.cli.flags import Of
from baton.services.cli.help import command
from baton.services.cli.operators import OPERATORS, addresses_of, become_operator
from baton.services.config import Settings

app = typer.Typer(
    name="metrics",
    short_help="Metrics of a deployment's processes, for Prometheus.",
    help="Metrics of a deployment's processes, for Prometheus: docs/observability.md.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _all_commands() -> None:
    """Keep `targets` a sub-command, though it is the only one."""


@command(app, *OPERATORS, of=Of.ANY)
def targets(settings: Settings) -> None:
    """Print every process that serves metrics, as JSON for Prometheus' file_sd_configs."""
    from baton.scheduler import members
    from baton.services.cli.status import describe

    become_operator(settings)
    known: dict[str, members.Member] = {}  # id -> process; each model's scheduler lists the routers
    for address in addresses_of(settings).values():
        told = describe(address)
        found = members.members((worker.identity for worker in told.workers), told.processes)
        known |= {one.id: one for one in found}
    print(json.dumps(members.targets(list(known.values())), indent=2))
