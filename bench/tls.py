"""The cost of mutual TLS between the parts, and certificates that are replaced under load.

    python -m bench tls [--arm handoff|served|rotation ...]

`handoff`: one prompt's KV over TCP, plain and encrypted in turns, between two processes without engines;
and small calls and connections. `served`: 1P1D deployments that hand over by TCP, in plain text and with TLS
in turns. `rotation`: a deployment whose certificates live for ten seconds, under a load whose
every token is checked. All three take some six minutes; the result is saved where all of them ran.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from bench import tls_handoff, tls_rotation, tls_served
from harness.stats import save

ARMS: dict[str, Callable[[], dict[str, Any]]] = {
    "handoff": tls_handoff.measure,
    "served": tls_served.measure,
    "rotation": tls_rotation.measure,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench tls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arm", choices=ARMS, action="append", help="one of them; all by default")
    chosen = parser.parse_args(arguments).arm or list(ARMS)
    results = {arm: ARMS[arm]() for arm in chosen}
    print(json.dumps(results, indent=2), flush=True)
    if set(chosen) == set(ARMS):
        save("tls", results)
    rotation = results.get("rotation", {})
    if any(rotation.get(kind) for kind in ("failed", "wrong", "missed")):
        raise SystemExit(f"requests failed or were wrong, or a certificate was not renewed: {rotation}")
