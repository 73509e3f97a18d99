"""The simulated hardware and model: speed and size of an engine, and speed of handoffs.

A profile is a JSON file; `python -m bench simulate --measure` measures one. The defaults are assumed figures
for a GPU with a model of 8 billion parameters, not measured ones.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from baton.services.errors import ConfigError

Points = list[tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pace(_Section):
    """The time of an engine step in seconds. Curves are linear between and beyond points."""

    prefill: Points = Field(
        [(0, 0.008), (512, 0.064), (8_192, 1.024)], description="prompt tokens of the step -> seconds"
    )
    prefill_context_s: float = Field(
        0.0, ge=0, description="for each pair of a token and one before its chunk"
    )
    decode: Points = Field(
        [(0, 0.008), (1, 0.012), (64, 0.024), (256, 0.050)], description="requests that decode -> seconds"
    )
    decode_context_s: float = Field(0.0, ge=0, description="for each token of their contexts")
    accepted: float = Field(1.0, ge=1, description="tokens of a request per decode step: 1 without drafts")
    drafting: float = Field(
        1.0, ge=1, description="factor on the time of decode steps, for drafting and verification"
    )
    overhead_s: float = Field(
        0.0, ge=0, description="for each request, until its first token: router and network"
    )

    @field_validator("prefill", "decode")
    @classmethod
    def _rises(cls, points: Points) -> Points:
        if len(points) < 2 or any(one[0] >= after[0] for one, after in pairwise(points)):
            raise ValueError("a curve needs at least two points, with increasing sizes")
        return points

    def step_s(self, tokens: int, pairs: int, requests: int, context: float) -> float:
        """Return the time of a step.

        tokens: prompt tokens
        pairs: sum over the chunks of their tokens times the prompt tokens before them
        requests: decoding requests
        context: sum of their contexts, in tokens
        """
        step_s = 0.0
        if tokens:
            step_s = _at(self.prefill, tokens) + self.prefill_context_s * pairs
        if requests:
            decode_s = (_at(self.decode, requests) + self.decode_context_s * context) * self.drafting
            # The fixed cost of a step counts once.
            step_s = step_s + max(0.0, decode_s - _at(self.decode, 0)) if tokens else decode_s
        return step_s


class Engine(_Section):
    """The size of an engine."""

    step_tokens: int = Field(8_192, ge=1, description="engine.max_num_batched_tokens")
    batch: int = Field(256, ge=1, description="engine.max_num_seqs")
    kv_tokens: int = Field(400_000, ge=1, description="tokens of the KV cache")
    max_model_len: int = Field(200_000, ge=1)
    cores: int = Field(0, ge=0, description="cores that all workers share; 0: each has one of its own")


class Handoff(_Section):
    """The transfer of KV from a prefill worker to a decode worker."""

    token_bytes: float = Field(131_072, ge=0, description="KV of a token")
    bytes_per_s: float = Field(10e9, gt=0, description="into one decode worker")
    latency_s: float = Field(0.002, ge=0, description="time of a handoff besides its bytes")
    early: bool = Field(True, description="KV is moved while its prompt is still being prefilled")
    staging_bytes: int = Field(16 << 30, ge=0, description="memory of a worker for saved KV")


class Profile(_Section):
    """A profile. All workers are the same."""

    name: str = "assumed"
    pace: Pace = Pace()
    engine: Engine = Engine()
    handoff: Handoff = Handoff()


def load(file: Path) -> Profile:
    """Read a profile. Raises ConfigError."""
    try:
        given: Any = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    try:
        return Profile.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file}: {where}: {first['msg']}") from None


def _at(points: Points, size: float) -> float:
    index = min(max(1, bisect_right(points, size, key=lambda point: point[0])), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))
