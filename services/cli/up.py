"""The command `baton up`: a whole deployment on one machine, reported on a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import baton
from baton.addresses import from_here
from baton.services.cli.flags import operator_flags
from baton.services.config import Settings
from baton.services.credentials import guarded
from baton.services.engine.args import served_model_name
from baton.services.fleet.supervisor import Fleet, supervise
from baton.services.leave import leave


def run_up(settings: Settings, fleet: Fleet, log_dir: str) -> NoReturn:
    """Run the deployment until a signal, stop it, exit.

    Raises ConfigError and StartError with one line that says what to do.
    """
    supervise(settings, fleet, log_dir, _Terminal(settings, fleet))
    leave(0)


class _Terminal:
    """The supervisor's observer that prints lines on stdout."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet

    def begun(self, log_dir: Path) -> None:
        model = served_model_name(self._settings.engine)
        print(f"Baton {baton.__version__}: model {model}, {self._fleet}, logs in {log_dir}", flush=True)

    def step(self, since_start_s: float, name: str, text: str) -> None:
        print(f"  [{since_start_s:5.1f} s] {name:<12} {text}", flush=True)

    def ready(self) -> None:
        print(_banner(self._settings), flush=True)

    def ending(self, drain_s: float) -> None:
        streams = f": running streams have {drain_s:g} s (router.drain_timeout_s)" if drain_s else ""
        print(f"\n  stopping{streams}; Ctrl-C again kills everything at once", flush=True)

    def ended(self) -> None:
        print("  stopped: no process is left", flush=True)


def _banner(settings: Settings) -> str:
    model = served_model_name(settings.engine)
    url = settings.router.url
    scheduler = from_here(settings.scheduler.address) + operator_flags(settings)
    header, key = ("-H 'Authorization: Bearer KEY' ", "KEY") if guarded(settings.router) else ("", "none")
    return f"""
Ready. OpenAI's API is served at {url}/v1

  curl {url}/v1/chat/completions {header}-H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

  python:   OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions.create(model="{model}", ...)
  status:   {Path(sys.argv[0]).name} status --scheduler {scheduler}
  metrics:  {url}/metrics
  stop:     Ctrl-C
"""
