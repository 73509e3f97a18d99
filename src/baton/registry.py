"""Registries of things that a configuration chooses by name, such as speculative methods and transports.

Baton's entries are in a table; installed packages add more with entry points, `name = "module:attribute"`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.errors import BatonError

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """The place where a registered thing is defined, and the package that registered it."""

    module: str
    attribute: str
    origin: str

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute} ({self.origin})"


class Registry(Generic[T]):
    """Load things of one kind by name. Each is imported on first use."""

    def __init__(
        self,
        kind: str,
        base: type,
        builtin: Mapping[str, str],
        *,
        group: str = "",
        aliases: Mapping[str, str] | None = None,
        former: Mapping[str, str] | None = None,
        error: Callable[[str], BatonError] = BatonError,
    ) -> None:
        """Describe a kind; nothing is imported.

        kind: the word in messages, e.g. "speculative method"
        base: the class of which each thing is an instance or a subclass
        builtin: name -> "module:attribute" of Baton's own
        group: entry-point group of other packages; "" for none
        aliases: another name -> name
        former: old name -> its replacement
        error: makes the exception to raise from its text
        """
        self.kind = kind
        self.group = group
        self._base = base
        self._error = error
        self._aliases = dict(aliases or {})
        self._former = dict(former or {})
        self._builtin = {name: _target(place, "Baton") for name, place in builtin.items()}
        if twice := self._builtin.keys() & self._aliases.keys():
            raise ValueError(f"{kind} {min(twice)!r} is a name and an alias")

    def names(self) -> list[str]:
        """Return all names, including those from installed packages, without aliases."""
        return sorted({*self._builtin, *(name for name, _ in self._announced())})

    def load(self, name: str) -> T:
        """Return the thing with this name or alias.

        Raises the registry's error if the name is unknown or registered twice, or if the thing cannot be
        imported or is of another kind.
        """
        target = self._find(name)
        try:
            found = getattr(importlib.import_module(target.module), target.attribute)
        except Exception as error:  # whatever another package raises while it is imported
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._error(f"{self.kind} {name!r} cannot be loaded from {target}: {reason}") from error
        fits = issubclass(found, self._base) if isinstance(found, type) else isinstance(found, self._base)
        if not fits:
            raise self._error(f"{self.kind} {name!r}: {target} is no {self._base.__name__}")
        return found  # type: ignore[no-any-return]

    def check(self, names: Iterable[str]) -> None:
        """Raise the registry's error for an unknown name; nothing is imported."""
        for name in names:
            self._find(name)

    def _find(self, name: str) -> Target:
        targets = [target for one, target in self._announced() if one == name]
        builtin = self._builtin.get(self._aliases.get(name, name))
        if builtin is not None:
            targets.insert(0, builtin)
        if not targets:
            raise self._error(self._unknown(name))
        if len(targets) > 1:
            claims = " and ".join(map(str, targets))
            raise self._error(f"{self.kind} {name!r} is registered twice: {claims}; uninstall one")
        return targets[0]

    def _unknown(self, name: str) -> str:
        if now := self._former.get(name):
            return f"there is no {self.kind} {name!r} any more; write {now!r} instead"
        known = self.names()
        close = difflib.get_close_matches(name.lower(), [*known, *self._aliases], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"there is no {self.kind} {name!r}{hint}; there are: {', '.join(known)}"

    def _announced(self) -> Iterator[tuple[str, Target]]:
        if not self.group:
            return
        # A package may be on the path twice.
        seen: set[tuple[str, str]] = set()
        for point in _entry_points(self.group, tuple(sys.path)):
            if (point.name, point.value) not in seen:
                seen.add((point.name, point.value))
                origin = f"package {point.dist.name}" if point.dist else "an entry point"
                yield point.name, Target(point.module, point.attr, origin)


@functools.cache
def _entry_points(group: str, path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    """Return a group's entry points. Cached, because scanning all packages takes 8 ms."""
    del path
    return importlib.metadata.entry_points(group=group)


def _target(place: str, origin: str) -> Target:
    module, _, attribute = place.partition(":")
    return Target(module, attribute, origin)
