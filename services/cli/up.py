"""The command `baton up`: a whole deployment on one machine, for a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import baton
from baton.addresses import from_here, join, listen, split
from baton.handoff.ports import of_worker
from baton.services.cli.flags import operator_flags, warned
from baton.services.config import Settings
from baton.services.credentials import guarded, open_to_all
from baton.services.fleet.supervisor import Fleet, started, supervise
from baton.services.leave import leave
from baton.services.models import Model
from baton.services.printing import say, step


def run_up(settings: Settings, fleet: Fleet | None, log_dir: str) -> NoReturn:
    """Run the deployment until a signal, stop it and exit. Raises ConfigError and StartError.

    `fleet`: the workers; None for those of the configuration.
    """
    whole = started(settings, fleet)
    if settings.ops.listen is None:
        settings.ops.listen = beside_router(settings, [one.model for one in whole])
    width = 12 + max(len(one.model.prefix) for one in whole)  # column of names

    def tell(event: dict[str, Any]) -> None:
        match event["event"]:
            case "begun":
                models = "; ".join(f"model {one.model.name}, {one.fleet}" for one in whole)
                say(f"Baton {baton.__version__}: {models}, logs in {event['log_dir']}")
            case "step":
                say(step(event["since_start_s"], event["name"], event["text"], width))
            case "ready":
                say(_banner(settings, [one.model for one in whole]))
            case "ending":
                drain_s = event["drain_s"]
                streams = f": running streams have {drain_s:g} s (router.drain_timeout_s)" if drain_s else ""
                say(f"\n  stopping{streams}; Ctrl-C again kills everything at once")
            case "ended":
                say("  stopped: no process is left")

    supervise(settings, fleet, log_dir, tell)
    leave(0)


def beside_router(settings: Settings, models: Iterable[Model]) -> str:
    """Return a loopback address for the live page, with the port after the router's or a free one.

    Ports that the settings name are not free, even if their processes have not started yet.
    """
    named = {settings.router.metrics_port}
    for model in models:
        own = model.settings
        named |= {split(one)[1] for one in own.scheduler.address.split(",")}
        named |= {own.scheduler.metrics_port, *of_worker(own.handoff.port, own.engine.ranks)}
    after = settings.router.port + 1
    for wanted in (0,) if after in named else (after, 0):
        with contextlib.suppress(OSError, OverflowError), listen("127.0.0.1", wanted) as sock:
            return join(*sock.getsockname()[:2])
    return ""  # no port is free


def _banner(settings: Settings, models: Sequence[Model]) -> str:
    model = models[0].name
    url = settings.router.url
    scheduler = ",".join(map(from_here, settings.scheduler.address.split(",")))
    status = f"--scheduler {scheduler}{operator_flags(settings)}"
    if settings.models:  # each has a scheduler
        status = "--config FILE, as here"
    header, key = ("-H 'Authorization: Bearer KEY' ", "KEY") if guarded(settings.router) else ("", "none")
    page = f"  page:     http://{from_here(settings.ops.listen)}/ops\n" if settings.ops.listen else ""
    metrics = "" if settings.router.has_tenants else f"  metrics:  {url}/metrics\n"  # tenants cannot see it
    return f"""
Ready. OpenAI's API is served at {url}/v1

  curl {url}/v1/chat/completions {header}-H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

  python:   OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions.create(model="{model}", ...)
{page}  status:   {Path(sys.argv[0]).name} status {status}
{metrics}  stop:     Ctrl-C
{warned(open_to_all(settings.router))}"""
