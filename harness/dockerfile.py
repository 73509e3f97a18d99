"""The instructions of deploy/Dockerfile."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from harness.support import ROOT


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str  # its lines, joined


def instructions() -> list[Instruction]:
    lines = [
        line
        for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parts = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(name.upper(), " ".join(rest.split())) for name, _, rest in parts]


def texts(name: str) -> list[str]:
    return [one.text for one in instructions() if one.name == name]


def of_the_user() -> list[str]:
    """Return the RUN instructions after USER."""
    every = instructions()
    first = [one.name for one in every].index("USER")
    return [one.text for one in every[first:] if one.name == "RUN"]


def workdir() -> str:
    return texts("WORKDIR")[-1]


def user() -> str:
    return texts("USER")[-1]


def environment(path: str) -> dict[str, str]:
    """Return the variables that ENV sets; `path` is the base image's PATH."""
    found: dict[str, str] = {}
    for text in texts("ENV"):
        for part in shlex.split(text):
            key, _, value = part.partition("=")
            found[key] = value.replace("$PATH", path)
    return found
