"""The command `baton node`: the workers of one machine, reported to a terminal or to the ordering program."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NoReturn

from baton.services import roles
from baton.services.config import REVEAL, Settings
from baton.services.errors import ConfigError
from baton.services.fleet import devices
from baton.services.fleet.node import Lines, PartOrder, run_node
from baton.services.fleet.supervisor import Fleet, log_folder
from baton.services.leave import leave
from baton.services.printing import say


def run(settings: Settings, fleet: Fleet, log_dir: str, *, orders: bool) -> NoReturn:
    """Run the workers until a signal, or with `orders` the ones that stdin names; exit when none is left.

    Raises ConfigError and StartError.
    """
    if bool(fleet.roles) == orders:
        raise ConfigError("give the workers to run (--prefill, --decode, --mixed), or --orders, one of both")
    folder = log_folder(log_dir)
    if orders:
        # Libraries' output goes to stderr, apart from the events.
        events = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        run_node([], folder, Lines(events), listen=True)
    else:
        settings.scheduler.check_shared()
        say(f"{fleet} of the deployment at {settings.scheduler.address}, logs in {folder}")
        run_node(_ordered(settings, fleet), folder, _Terminal(), listen=False)
        say("  stopped: no process is left")
    leave(0)


def _ordered(settings: Settings, fleet: Fleet) -> list[PartOrder]:
    for role in fleet.roles:
        roles.check(roles.role(role), settings)
    tree = settings.model_dump(mode="json", context=REVEAL)
    shares = devices.assign([settings.engine.tensor_parallel_size] * len(fleet.roles), settings.fleet.devices)
    devices.check_memory(shares, [settings.engine] * len(shares))
    return [
        PartOrder(
            name=f"{role}-{os.uname().nodename}-{fleet.roles[:number].count(role)}",
            role=role,
            settings=tree,
            environment=share.environment,
            cores=len(share.cpu.split(",")),
        )
        for number, (role, share) in enumerate(zip(fleet.roles, shares, strict=True))
    ]


class _Terminal:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def said(self, name: str, text: str) -> None:
        say(f"  [{time.monotonic() - self._began:5.1f} s] {name:<12} {text}")

    def parts(self, states: Mapping[str, str]) -> None:
        del states  # each change is printed, too
