"""The command `baton node`: the workers of one machine, for a terminal or for a program that gives orders."""

from __future__ import annotations

import json
import os
import time
from typing import Any, NoReturn

from baton.services import roles
from baton.services.config import REVEAL, Settings
from baton.services.errors import ConfigError
from baton.services.fleet import devices
from baton.services.fleet.node import PartOrder, run_node
from baton.services.fleet.places import Plan, members_of
from baton.services.fleet.supervisor import Fleet, log_folder
from baton.services.leave import leave
from baton.services.printing import put, say, step


def run(settings: Settings, fleet: Fleet, log_dir: str, *, orders: bool) -> NoReturn:
    """Run the fleet, or with `orders` the parts that stdin lists, until a signal; then exit.

    Raises ConfigError and StartError.
    """
    if bool(fleet.roles) == orders:
        raise ConfigError("give either workers to run (--prefill, --decode, --mixed, --encode) or --orders")
    folder = log_folder(log_dir)
    if orders:
        events = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # keeps libraries' output out of the events
        run_node([], folder, lambda event: put(events, json.dumps(event) + "\n"), listen=True)
    else:
        settings.scheduler.check_shared()
        say(f"{fleet} of the deployment at {settings.scheduler.address}, logs in {folder}")
        began = time.monotonic()

        def tell(event: dict[str, Any]) -> None:
            if event["event"] == "said":
                say(step(time.monotonic() - began, event["name"], event["text"]))

        run_node(_ordered(settings, fleet), folder, tell, listen=False)
        say("  stopped: no process is left")
    leave(0)


def _ordered(settings: Settings, fleet: Fleet) -> list[PartOrder]:
    plan = Plan(settings, fleet.roles)
    for role in set(fleet.roles):
        roles.check(roles.role(role), plan.settings_of(role))
    if settings.fleet.node_rank and all(plan.settings_of(role).engine.nodes == 1 for role in fleet.roles):
        raise ConfigError(
            f"fleet.node_rank (value {settings.fleet.node_rank}): the workers here span no further machines: "
            "set engine.nodes (--nodes), or leave it out"
        )
    members = [
        (name, role, own)
        for number, role in enumerate(fleet.roles)
        for name, own in members_of(
            _place(role, fleet.roles[:number].count(role), plan.settings_of(role)), plan.settings_of(role)
        ).items()
    ]
    engines = [own.engine for _, _, own in members]
    shares = devices.assign([one.local_ranks for one in engines], settings.fleet.devices)
    devices.check_memory(shares, engines)
    return [
        PartOrder(
            name=name,
            role=role,
            settings=own.model_dump(mode="json", context=REVEAL),
            environment=share.environment,
            cores=len(share.cpu.split(",")),
        )
        for (name, role, own), share in zip(members, shares, strict=True)
    ]


def _place(role: str, number: int, settings: Settings) -> str:
    """Return a place's name, which is unique; all machines of a gang use the one of `baton up`."""
    if settings.engine.nodes == 1:
        return f"{role}-{os.uname().nodename}-{number}"
    return "-".join(filter(None, (role, settings.worker.gang_name, str(number))))
