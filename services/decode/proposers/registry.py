"""Names of speculative methods, and the classes behind them, imported when a configuration names one.

A method of another package announces itself by an entry point of the group `baton.speculative_methods`,
`name = "module:Class"`; see docs/adding-a-method.md.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from baton.services.decode.proposers.method import Method
from baton.services.errors import ConfigError

GROUP = "baton.speculative_methods"


@dataclass(frozen=True)
class Place:
    """Where a method's class lies, and who says so."""

    module: str
    attribute: str
    origin: str

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute} ({self.origin})"


_METHODS: dict[str, Place] = {}
_ALIASES: dict[str, str] = {}  # vLLM's, FastDeploy's and LMDeploy's names -> ours


def register(name: str, module: str, attribute: str, aliases: tuple[str, ...] = ()) -> None:
    """Make a method known by name. Raises ValueError, with both origins, when a name is taken."""
    place = Place(module, attribute, "Baton")
    for one in (name, *aliases):
        if (taken := _builtin(one)) is not None:
            raise ValueError(f"speculative method {one!r} is registered twice: {taken} and {place}")
    _METHODS[name] = place
    _ALIASES.update(dict.fromkeys(aliases, name))


def names() -> list[str]:
    """Of all methods, those of installed packages included; without aliases."""
    return sorted({*_METHODS, *(name for name, _ in _announced())})


def method(name: str) -> Method:
    """The method of that name or alias.

    Raises ConfigError for a name that is not known, that two packages claim, or behind which there is no
    method; what another package's import raises is in the error's text.
    """
    places = [place for one, place in _announced() if one == name]
    builtin = _builtin(name)
    if builtin is not None:
        places.insert(0, builtin)
    if not places:
        known = names()
        close = difflib.get_close_matches(name.lower(), [*known, *_ALIASES], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"engine.speculative_config.method: there is no method {name!r}{hint}; "
            f"there are: {', '.join(known)}"
        )
    if len(places) > 1:
        claims = " and ".join(map(str, places))
        raise ConfigError(f"speculative method {name!r} is registered twice: {claims}; uninstall one")
    return _load(name, places[0])


def _builtin(name: str) -> Place | None:
    return _METHODS.get(_ALIASES.get(name, name))


def _announced() -> Iterator[tuple[str, Place]]:
    """What installed packages offer; nothing of them is imported."""
    found: Counter[tuple[str, str]] = Counter()
    for point in importlib.metadata.entry_points(group=GROUP):
        found[point.name, point.value] += 1
        if found[point.name, point.value] > 1:
            continue  # one package, found twice on the path
        origin = f"package {point.dist.name}" if point.dist else "an entry point"
        yield point.name, Place(point.module, point.attr, origin)


def _load(name: str, place: Place) -> Method:
    try:
        found = getattr(importlib.import_module(place.module), place.attribute)
    except Exception as error:  # whatever another package raises while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"speculative method {name!r} cannot be loaded from {place}: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"speculative method {name!r}: {place} is no subclass of {Method.__qualname__}")
    return found()


_HERE = __package__
# vLLM's MTPModelTypes, and the names that FastDeploy and LMDeploy use
_MTP = (
    *("deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
    *("glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp"),
    *("qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp"),
    *("bailing_hybrid_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp"),
    *("gemma4_mtp", "inkling_mtp", "glm5_next_mtp"),
)
register("mtp", f"{_HERE}.mtp", "Mtp", aliases=_MTP)
register("eagle", f"{_HERE}.eagle", "Eagle")
register("eagle3", f"{_HERE}.eagle3", "Eagle3")
register("draft_model", f"{_HERE}.draft_model", "DraftModel")
register("medusa", f"{_HERE}.medusa", "Medusa")
register("ngram", f"{_HERE}.ngram", "Ngram", aliases=("[ngram]", "ngram_match"))
register("suffix", f"{_HERE}.suffix", "Suffix")
