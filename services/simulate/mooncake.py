"""Traces in Mooncake's format: one JSON object per line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds. Each of `hash_ids` identifies 512 tokens of the prompt and everything before
them; the last one may cover fewer. Published with Qin et al., "Mooncake: Trading More Storage for Less
Computation", FAST 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.services.errors import ConfigError
from baton.services.simulate.traces import Ask, Trace

BLOCK_TOKENS = 512
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass
class MooncakeTrace(Trace):
    """A recorded trace, replayed `speed` times as fast."""

    asks: list[Ask]
    speed: float = 1.0
    block_tokens: int = BLOCK_TOKENS

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """The time from the first arrival to just after the last."""
        return (self.asks[-1].at - self.asks[0].at) / self.speed + 1e-6

    def begin(self) -> Iterator[Ask]:
        start = self.asks[0].at
        for ask in self.asks:
            yield replace(ask, at=(ask.at - start) / self.speed)


def read(file: Path, *, speed: float = 1.0, most: int = 0) -> MooncakeTrace:
    """Read a trace, or only its first `most` requests. Raises ConfigError."""
    asks: list[Ask] = []
    try:
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    asks.append(_ask(line, number, f"{file}, line {number}"))
                if most and len(asks) == most:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not asks:
        raise ConfigError(f"{file} has no requests")
    asks.sort(key=lambda ask: ask.at)
    return MooncakeTrace(asks, speed)


def _ask(line: str, number: int, where: str) -> Ask:
    try:
        found: Any = json.loads(line)
        at, prompt, output, ids = (found[key] for key in _KEYS)
        hashes = [_hash(int(one)) for one in ids[: int(prompt) // BLOCK_TOKENS]]
        ask = Ask(float(at) / 1e3, int(prompt), int(output), hashes, number)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        keys = ", ".join(_KEYS)
        raise ConfigError(f"{where}: {error!r}; a request is a JSON object with {keys}") from None
    if ask.prompt < 1 or ask.output < 1:
        raise ConfigError(f"{where}: input_length and output_length must be at least 1")
    return ask


def _hash(number: int) -> int:
    """Return 64 mixed bits, because block keys ignore the lowest ones (SplitMix64, Steele et al., 2014)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
