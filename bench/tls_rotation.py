"""Certificates that live for ten seconds, under a load whose every token is checked.

`baton ca serve`, and a scheduler, a prefill and a decode worker and a router that join with tokens of
`baton ca token --life-s 10`, as on several machines; KV goes over TCP. Each part renews its certificate all
the time: that is counted by its log.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.checked import Served, outcome
from harness.chaos.answers import questions
from harness.chaos.load import Load
from harness.deployment import START_S, Deployment, deployment
from harness.support import BATON, CALL_S, ROOT, eventually, free_port

LIFE_S = 10  # of a certificate: the shortest that `baton ca token` takes
SECONDS = 60.0  # of load
CLIENTS = 8
EVERY = 6  # one in so many prompts is asked
PARTS = {"scheduler": "scheduler", "prefill": "worker", "decode": "worker", "router": "router"}  # part: role
RENEWED, MISSED = "the certificate was renewed", "was not renewed"


def measure() -> dict[str, Any]:
    """Start the parts, and send the load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ca, address = folder / "ca", f"127.0.0.1:{free_port()}"
        with deployment(
            folder / "parts",
            handoff={"transports": ["tcp"]},
            scheduler={"idle_decode_tokens": 0},
            security={"tls": True, "ca": str(ca), "join": address},
        ) as one:
            _command("ca", "init", "--security-ca", str(ca))
            one.start("ca", "ca", "serve", "--listen", address)
            for part, role in PARTS.items():
                token = _token(folder / part, role, ca)
                one.start(part, part, "--security-token-file", str(token))
            eventually(
                lambda: one.workers("prefill") and one.workers("decode"), START_S, "the workers are ready"
            )
            eventually(one.healthy, START_S, "the router serves")
            return asyncio.run(_under_load(one))


async def _under_load(one: Deployment) -> dict[str, Any]:
    asked = await questions(one.url, EVERY)
    before = {part: _said(one, part, RENEWED) for part in PARTS}
    async with Load(Served(one.url), asked, CLIENTS, "rotation") as load:
        await asyncio.sleep(SECONDS)
    return {
        "life_s": LIFE_S,
        "seconds": SECONDS,
        "clients": CLIENTS,
        "rotations": {part: _said(one, part, RENEWED) - count for part, count in before.items()},
        "missed": sum(_said(one, part, MISSED) for part in PARTS),
        **outcome(load),
    }


def _said(one: Deployment, part: str, text: str) -> int:
    return one.processes[part].text.count(text)


def _token(path: Path, role: str, ca: Path) -> Path:
    made = _command("ca", "token", "--role", role, "--life-s", str(LIFE_S), "--security-ca", str(ca))
    path.touch(0o600)
    path.write_text(made)
    return path


def _command(*words: str) -> str:
    line = [BATON, *words]
    done = subprocess.run(line, capture_output=True, check=True, timeout=CALL_S, cwd=ROOT, text=True)
    return done.stdout
