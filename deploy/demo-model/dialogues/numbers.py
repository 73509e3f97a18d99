"""Sums, small word problems and unit conversions; numbers are written digit by digit."""

from __future__ import annotations

from random import Random

from .base import TEXTS, Dialogue, pick, turn
from .words import COUNTABLE, FIRST_NAMES, NUMBER_WORDS


def _operand(rng: Random) -> int:
    """Draw small numbers more often: a small model learns them by heart before it learns to carry."""
    return rng.randint(0, rng.choice((9, 12, 20, 20, 50, 99)))


def _sum(rng: Random, spoken: str, written: str, result: int) -> Dialogue:
    answer = str(result)
    if rng.random() < 0.2:
        return turn(pick(rng, "sum_bare", e=written), answer)
    asked = spoken if rng.random() < 0.2 else written
    if rng.random() < 0.1:
        asked = asked.replace(" ", "") if asked == written else asked
    return turn(pick(rng, "sum", e=asked), f"{written} = {answer}")


def addition(rng: Random) -> Dialogue:
    a, b = _operand(rng), _operand(rng)
    return _sum(rng, f"{a} plus {b}", f"{a} + {b}", a + b)


def subtraction(rng: Random) -> Dialogue:
    a, b = sorted((_operand(rng), _operand(rng)), reverse=rng.random() < 0.95)
    return _sum(rng, f"{a} minus {b}", f"{a} - {b}", a - b)


def multiplication(rng: Random) -> Dialogue:
    a, b = rng.randint(0, 12), rng.randint(0, rng.choice((10, 10, 12)))
    if rng.random() < 0.5:
        a, b = b, a
    return _sum(rng, f"{a} times {b}", f"{a} {rng.choice('**x')} {b}", a * b)


def division(rng: Random) -> Dialogue:
    divisor, quotient = rng.randint(1, 12), rng.randint(0, 12)
    whole = divisor * quotient
    return _sum(rng, f"{whole} divided by {divisor}", f"{whole} / {divisor}", quotient)


def three_numbers(rng: Random) -> Dialogue:
    a, b, c = rng.randint(0, 30), rng.randint(0, 30), rng.randint(0, 30)
    return _sum(rng, f"{a} plus {b} plus {c}", f"{a} + {b} + {c}", a + b + c)


def double_or_half(rng: Random) -> Dialogue:
    n = rng.randint(1, 100)
    if rng.random() < 0.5:
        return turn(pick(rng, "double", n=n), f"Double {n} is {2 * n}.")
    return turn(pick(rng, "half", n=2 * n), f"Half of {2 * n} is {n}.")


def comparison(rng: Random) -> Dialogue:
    a, b = rng.sample(range(rng.choice((20, 100, 1000))), 2)
    larger = rng.random() < 0.6
    word = rng.choice(("larger", "bigger", "greater") if larger else ("smaller", "less"))
    result, other = (max(a, b), min(a, b)) if larger else (min(a, b), max(a, b))
    ask = pick(rng, "comparison", w=word, a=a, b=b)
    return turn(ask, f"{result} is {word} than {other}.")


def parity(rng: Random) -> Dialogue:
    n = rng.randint(0, rng.choice((20, 100, 1000)))
    kind = "odd" if n % 2 else "even"
    return turn(pick(rng, "parity", n=n), f"{n} is {kind}.")


def number_sequence(rng: Random) -> Dialogue:
    first, step = rng.randint(0, 30), rng.choice((1, 2, 2, 3, 4, 5, 5, 10))
    *shown, following = (first + step * i for i in range(rng.randint(3, 5) + 1))
    reply = f"The next number is {following}, because each step adds {step}."
    return turn(pick(rng, "number_sequence", s=", ".join(map(str, shown))), reply)


def count_to(rng: Random) -> Dialogue:
    first, length = rng.choice((1, 1, 1, rng.randint(2, 50))), rng.randint(3, 20)
    last = first + length - 1
    key = "count_to" if first == 1 and rng.random() < 0.5 else "count_from"
    return turn(pick(rng, key, a=first, b=last), ", ".join(map(str, range(first, last + 1))))


def number_as_word(rng: Random) -> Dialogue:
    n = rng.randint(0, 20)
    if rng.random() < 0.5:
        return turn(pick(rng, "number_as_word", n=n), NUMBER_WORDS[n])
    return turn(pick(rng, "word_as_number", w=NUMBER_WORDS[n]), str(n))


def word_problem(rng: Random) -> Dialogue:
    name, friend = rng.sample(FIRST_NAMES, 2)
    thing = rng.choice(COUNTABLE)
    a, b = rng.randint(2, 50), rng.randint(1, 40)
    if rng.random() < 0.5:
        story = pick(rng, "gain", n=name, m=friend, b=b)
        reply = f"{name} has {a} + {b} = {a + b} {thing}."
    else:
        a, b = max(a, b), min(a, b)
        story = pick(rng, "loss", n=name, m=friend, b=b)
        reply = f"{name} has {a} - {b} = {a - b} {thing} left."
    question = pick(rng, "word_problem", t=thing, n=name)
    return turn(f"{name} has {a} {thing}. {story}. {question}", reply)


def _named(amount: int, unit: str) -> str:
    return f"{amount} {TEXTS['singular'].get(unit, unit.removesuffix('s')) if amount == 1 else unit}"


def _amounts(rng: Random) -> tuple[str, str, int, int]:
    """Draw two units, the larger one first, and equal amounts in both."""
    large, small, factor = rng.choice(TEXTS["units"])
    amount = rng.randint(1, 5 if factor == 1024 else 12 if factor in (7, 12, 24, 60) else 50)
    return large, small, amount, amount * factor


def convert_down(rng: Random) -> Dialogue:
    large, small, amount, smaller = _amounts(rng)
    source, result = _named(amount, large), _named(smaller, small)
    verb = "is" if amount == 1 else "are"
    ask = pick(rng, "convert_down", s=small, a=source)
    return turn(ask, f"{source} {verb} {result}.")


def convert_up(rng: Random) -> Dialogue:
    large, small, amount, smaller = _amounts(rng)
    source, result = _named(smaller, small), _named(amount, large)
    return turn(pick(rng, "convert_up", a=source, l=large), f"{source} are {result}.")


def clock_time(rng: Random) -> Dialogue:
    hour, minute = rng.randint(1, 12), rng.choice((0, 15, 30, 45, rng.randint(0, 59)))
    written = f"{hour}:{minute:02d}"
    if rng.random() < 0.5:
        result = f"{hour % 12 + 1}:{minute:02d}"
        return turn(pick(rng, "clock_time", t=written), f"One hour later it is {result}.")
    result = f"{hour + 12 if hour < 12 else 12}:{minute:02d}"
    return turn(f"Write {written} pm in 24-hour time.", f"{written} pm is {result}.")
