"""Names of filters, scorers and pickers, and the classes behind them, loaded when first used.

To add one: write the class, `SCORERS.register("name", "module", "Class")`, and put the name into
`PolicyConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from baton.scheduler.errors import BadPolicy
from baton.scheduler.policy.base import Filter, PairFilter, Picker, Scorer

T = TypeVar("T")


class Registry(Generic[T]):
    """Name -> class of one kind."""

    def __init__(self, base: type[T]) -> None:
        self._base = base
        self._places: dict[str, tuple[str, str]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def register(self, name: str, module: str, class_name: str) -> None:
        """Raises BadPolicy when the name is taken."""
        if name in self._places:
            taken = ".".join(self._places[name])
            raise BadPolicy(f"{self._kind} {name!r} is registered already, as {taken}: choose another name")
        self._places[name] = (module, class_name)

    def load(self, name: str) -> type[T]:
        """The class. Raises BadPolicy for an unknown name, or one behind which there is no such class."""
        if name not in self._places:
            raise BadPolicy(f"{self._kind} {name!r} is unknown; there are: {', '.join(sorted(self._places))}")
        module, class_name = self._places[name]
        try:
            found = getattr(import_module(module), class_name)
        except (ImportError, AttributeError) as error:
            raise BadPolicy(f"{self._kind} {name!r} cannot be loaded: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise BadPolicy(f"{self._kind} {name!r}: {module}.{class_name} is no {self._base.__name__}")
        return found

    @property
    def _kind(self) -> str:
        return {"PairFilter": "pair filter"}.get(self._base.__name__, self._base.__name__.lower())


FILTERS: Registry[Filter] = Registry(Filter)  # type: ignore[type-abstract]
PAIR_FILTERS: Registry[PairFilter] = Registry(PairFilter)  # type: ignore[type-abstract]
SCORERS: Registry[Scorer] = Registry(Scorer)  # type: ignore[type-abstract]
PICKERS: Registry[Picker] = Registry(Picker)  # type: ignore[type-abstract]

_HERE = __package__
FILTERS.register("placeable", f"{_HERE}.filters", "Placeable")
FILTERS.register("same_revision", f"{_HERE}.revisions", "SameRevision")
FILTERS.register("not_excluded", f"{_HERE}.filters", "NotExcluded")
FILTERS.register("fits", f"{_HERE}.filters", "Fits")
FILTERS.register("room", f"{_HERE}.filters", "Room")
PAIR_FILTERS.register("compatible", f"{_HERE}.filters", "Compatible")
SCORERS.register("queued_prompt_tokens", f"{_HERE}.scorers", "QueuedPromptTokens")
SCORERS.register("staging_room", f"{_HERE}.scorers", "StagingRoom")
SCORERS.register("running_requests", f"{_HERE}.scorers", "RunningRequests")
SCORERS.register("free_blocks", f"{_HERE}.scorers", "FreeBlocks")
PICKERS.register("power_of_two", f"{_HERE}.pickers", "PowerOfTwo")
PICKERS.register("best", f"{_HERE}.pickers", "Best")

_SCORERS: Mapping[str, float] = MappingProxyType(
    {"queued_prompt_tokens": 1.0, "staging_room": 1.0, "running_requests": 1.0, "free_blocks": 1.0}
)


class PolicyOptions(Protocol):
    """What is read of the settings; `PolicySettings` of the configuration tree is one."""

    filters: list[str]
    pair_filters: list[str]
    scorers: dict[str, float]
    picker: str


@dataclass(frozen=True)
class PolicyConfig:
    """Which classes decide, by name. Filters are asked in this order; scores are averaged by weight."""

    filters: tuple[str, ...] = ("placeable", "same_revision", "not_excluded", "fits", "room")
    pair_filters: tuple[str, ...] = ("compatible",)
    scorers: Mapping[str, float] = field(default_factory=lambda: _SCORERS)  # name -> weight
    picker: str = "power_of_two"
    seed: int | None = None  # of the picker's draws; None: another one in each process

    @classmethod
    def of(cls, settings: PolicyOptions) -> PolicyConfig:
        return cls(
            filters=tuple(settings.filters),
            pair_filters=tuple(settings.pair_filters),
            scorers=settings.scorers,
            picker=settings.picker,
        )

    def __post_init__(self) -> None:
        for name, weight in self.scorers.items():
            if weight <= 0:
                raise BadPolicy(f"scorer {name!r} has weight {weight}: it must be above 0")
