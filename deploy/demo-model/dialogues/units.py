"""Unit conversions with whole factors."""

from __future__ import annotations

from random import Random

from .base import Dialogue, generator, turn

# (larger unit, smaller unit, how many of the smaller make one of the larger)
_UNITS = (
    ("kilometers", "meters", 1000),
    ("meters", "centimeters", 100),
    ("centimeters", "millimeters", 10),
    ("kilograms", "grams", 1000),
    ("liters", "milliliters", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("feet", "inches", 12),
    ("yards", "feet", 3),
    ("dozens", "items", 12),
    ("dollars", "cents", 100),
    ("euros", "cents", 100),
    ("tons", "kilograms", 1000),
    ("centuries", "years", 100),
    ("decades", "years", 10),
    ("kilobytes", "bytes", 1024),
)
_SINGULAR = {"feet": "foot", "inches": "inch", "centuries": "century"}


def _named(amount: int, unit: str) -> str:
    return f"{amount} {_SINGULAR.get(unit, unit.removesuffix('s'))}" if amount == 1 else f"{amount} {unit}"


@generator("conversions", 3.0)
def convert_down(rng: Random) -> Dialogue:
    large, small, factor = rng.choice(_UNITS)
    amount = rng.randint(1, 5 if factor == 1024 else 12 if factor in (7, 12, 24, 60) else 50)
    ask = rng.choice(
        (
            "How many {s} are in {a}?",
            "Convert {a} to {s}.",
            "How many {s} is {a}?",
            "What is {a} in {s}?",
            "Please convert {a} into {s}.",
        )
    )
    result = _named(amount * factor, small)
    verb = "is" if amount == 1 else "are"
    return turn(
        ask.format(s=small, a=_named(amount, large)),
        f"{_named(amount, large)} {verb} {result}.",
        f"{verb} {result}",
    )


@generator("conversions", 2.0)
def convert_up(rng: Random) -> Dialogue:
    large, small, factor = rng.choice(_UNITS)
    amount = rng.randint(1, 5 if factor == 1024 else 12 if factor in (7, 12, 24, 60) else 50)
    source, result = _named(amount * factor, small), _named(amount, large)
    ask = rng.choice(("Convert {a} to {l}.", "How many {l} are {a}?", "What is {a} in {l}?"))
    return turn(ask.format(a=source, l=large), f"{source} are {result}.", f"are {result}.")


@generator("conversions", 1.0)
def clock_time(rng: Random) -> Dialogue:
    hour, minute = rng.randint(1, 12), rng.choice((0, 15, 30, 45, rng.randint(0, 59)))
    later = rng.random() < 0.5
    written = f"{hour}:{minute:02d}"
    if later:
        result = f"{hour % 12 + 1}:{minute:02d}"
        return turn(
            rng.choice(
                ("It is {t}. What time is it in one hour?", "What time is one hour after {t}?")
            ).format(t=written),
            f"One hour later it is {result}.",
            result,
        )
    result = f"{hour + 12 if hour < 12 else 12}:{minute:02d}"
    return turn(f"Write {written} pm in 24-hour time.", f"{written} pm is {result}.", f"is {result}.")
