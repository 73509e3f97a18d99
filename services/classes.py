"""Define service classes: their order, and the share that each is guaranteed (docs/classes.md).

A class with a lower `priority` goes first, as in vLLM: in the router's queue, for a worker's last slots, in
the engine's queue and within a step. No class starves: each has a `share`, and goes first once its
requests have waited in vain for `patience_s`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CLASSES = 16  # each has series of its own in the metrics
Priority = Annotated[int, Field(ge=-1_000, le=1_000, strict=True)]
Share = Annotated[float, Field(gt=0, lt=1)]
Patience = Annotated[float, Field(ge=0, le=86_400)]
Goal = Annotated[float, Field(gt=0, le=86_400)]
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A class as requests carry it. Classes after it leave its `share` free."""

    name: str = "interactive"
    priority: int = 0  # lower goes first
    ttft_s: float | None = None
    itl_s: float | None = None
    share: float = 0.25
    preemptible: bool = False
    patience_s: float = 0.0
    room: float = 1.0  # fraction of each limit that this class may fill; the rest is for classes ahead of it


STANDARD = ServiceClass()


class ClassSettings(BaseModel):
    """One class of requests."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    priority: Priority
    """Classes with a lower number go first, as in vLLM."""
    ttft_s: Goal | None = None
    """Goal for the time to first token, seconds. While requests of the class arrive, an engine's steps
    without them take at most about a fifth of it."""
    itl_s: Goal | None = None
    """Goal for the mean gap between tokens, seconds. Lower classes join an engine's steps only as far as this
    goal allows; without a goal they join all steps."""
    share: Share = 0.1
    """Guaranteed share of placements, of an engine's time during prompts, and of the requests in a decode
    step. Lower classes also leave this share of the workers' room free."""
    preemptible: bool = False
    """Whether an engine may preempt requests of this class. They continue later, with the same answer."""
    patience_s: Patience = 30.0
    """In the router's queue, the class goes before all others if none of its waiting requests was placed for
    this many seconds; in an engine's, its requests go before all that arrive more than about this much
    later."""


class _Interactive(ClassSettings):
    priority: Priority = 0
    ttft_s: Goal | None = 1.0
    itl_s: Goal | None = 0.1
    share: Share = 0.25
    patience_s: Patience = 0.0


class _Batch(ClassSettings):
    priority: Priority = 10
    preemptible: bool = True


class ClassesSettings(BaseModel):
    """Classes of requests (docs/classes.md): two are built in, others are added by name."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, hide_input_in_errors=True)
    __pydantic_extra__: dict[str, ClassSettings] = Field(init=False)

    interactive: _Interactive = Field(
        default_factory=_Interactive, description="A user waits for the answer. The default."
    )
    batch: _Batch = Field(default_factory=_Batch, description="Work that can wait. It uses spare capacity.")

    def named(self) -> dict[str, ClassSettings]:
        """Return the settings of all classes by name, in order of priority."""
        found: dict[str, ClassSettings] = {
            "interactive": self.interactive,
            "batch": self.batch,
            **self.__pydantic_extra__,
        }
        return dict(sorted(found.items(), key=lambda item: item[1].priority))

    @model_validator(mode="after")
    def _fit_together(self) -> ClassesSettings:
        named = self.named()
        for name in named:
            if not _NAME.fullmatch(name):
                raise ValueError(f"the name {name!r}: use 1 to 32 of a-z, 0-9, - and _")
        if len(named) > MOST_CLASSES:
            raise ValueError(f"{len(named)} classes are too many: {MOST_CLASSES} are allowed")
        if (total := sum(one.share for one in named.values())) > 1:
            shares = ", ".join(f"{name} {one.share:g}" for name, one in named.items())
            raise ValueError(f"the shares add up to more than 1 ({total:g}: {shares})")
        ordered = list(named.items())
        for (first, before), (second, after) in pairwise(ordered):
            if before.priority == after.priority:
                raise ValueError(f"{first} and {second} have the same priority ({after.priority})")
            if before.patience_s > after.patience_s:
                raise ValueError(
                    f"{second} goes after {first} (priority) but has less patience_s "
                    f"({after.patience_s:g}, {before.patience_s:g})"
                )
        return self


class Classes:
    """The classes of a deployment. Immutable."""

    def __init__(self, settings: ClassesSettings | None = None) -> None:
        self._by_name: dict[str, ServiceClass] = {}
        room = 1.0
        for name, one in (settings or ClassesSettings()).named().items():
            self._by_name[name] = ServiceClass(name, **one.model_dump(), room=round(room, 6))
            room -= one.share

    def __iter__(self) -> Iterator[ServiceClass]:
        return iter(self._by_name.values())

    def get(self, name: str) -> ServiceClass | None:
        return self._by_name.get(name)
