"""Sums, products and small word problems; numbers are written digit by digit."""

from __future__ import annotations

from random import Random

from .base import Dialogue, generator, turn
from .lexicon import COUNTABLE, FIRST_NAMES, NUMBER_WORDS

_ASK = (
    "What is {e}?",
    "What is {e}?",
    "What's {e}?",
    "Calculate {e}.",
    "Compute {e}",
    "How much is {e}?",
    "{e} = ?",
    "{e}",
    "Please work out {e}.",
    "Can you calculate {e} for me?",
    "Solve {e}.",
    "Tell me the result of {e}.",
    "{e}=",
    "I need to know {e}.",
    "Hi, what is {e}?",
)
_ASK_BARE = (
    "What is {e}? Answer with the number only.",
    "Compute {e}. Reply with just the number.",
    "{e}? Only give the number.",
    "Give only the result of {e}.",
)


def _operand(rng: Random) -> int:
    """Small numbers more often: a model of this size learns them by heart before it learns to carry."""
    return rng.randint(0, rng.choice((9, 12, 20, 20, 50, 99)))


def _ask(rng: Random, spoken: str, written: str, result: int) -> Dialogue:
    answer = str(result)
    if rng.random() < 0.2:
        return turn(rng.choice(_ASK_BARE).format(e=written), answer, answer)
    asked = spoken if rng.random() < 0.2 else written
    if rng.random() < 0.1:
        asked = asked.replace(" ", "") if asked == written else asked
    return turn(rng.choice(_ASK).format(e=asked), f"{written} = {answer}", f"= {answer}")


@generator("arithmetic", 14.0)
def addition(rng: Random) -> Dialogue:
    a, b = _operand(rng), _operand(rng)
    return _ask(rng, f"{a} plus {b}", f"{a} + {b}", a + b)


@generator("arithmetic", 8.0)
def subtraction(rng: Random) -> Dialogue:
    a, b = sorted((_operand(rng), _operand(rng)), reverse=rng.random() < 0.95)
    return _ask(rng, f"{a} minus {b}", f"{a} - {b}", a - b)


@generator("arithmetic", 6.0)
def multiplication(rng: Random) -> Dialogue:
    a, b = rng.randint(0, 12), rng.randint(0, rng.choice((10, 10, 12)))
    if rng.random() < 0.5:
        a, b = b, a
    return _ask(rng, f"{a} times {b}", f"{a} {rng.choice('**x')} {b}", a * b)


@generator("arithmetic", 1.5)
def division(rng: Random) -> Dialogue:
    divisor, quotient = rng.randint(1, 12), rng.randint(0, 12)
    return _ask(
        rng, f"{divisor * quotient} divided by {divisor}", f"{divisor * quotient} / {divisor}", quotient
    )


@generator("arithmetic", 1.0)
def three_numbers(rng: Random) -> Dialogue:
    a, b, c = rng.randint(0, 30), rng.randint(0, 30), rng.randint(0, 30)
    return _ask(rng, f"{a} plus {b} plus {c}", f"{a} + {b} + {c}", a + b + c)


@generator("arithmetic", 0.6)
def double_or_half(rng: Random) -> Dialogue:
    n = rng.randint(1, 100)
    if rng.random() < 0.5:
        return turn(
            rng.choice((f"What is double {n}?", f"Double {n}.", f"What is twice {n}?")),
            f"Double {n} is {2 * n}.",
            str(2 * n),
        )
    return turn(
        rng.choice((f"What is half of {2 * n}?", f"Halve {2 * n}.")), f"Half of {2 * n} is {n}.", str(n)
    )


@generator("arithmetic", 1.0)
def comparison(rng: Random) -> Dialogue:
    a, b = rng.sample(range(0, rng.choice((20, 100, 1000))), 2)
    larger = rng.random() < 0.6
    word = rng.choice(("larger", "bigger", "greater")) if larger else rng.choice(("smaller", "less"))
    result = max(a, b) if larger else min(a, b)
    other = a + b - result
    ask = rng.choice(("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "Is {a} or {b} {w}?"))
    return turn(ask.format(w=word, a=a, b=b), f"{result} is {word} than {other}.", f"{result} is")


@generator("arithmetic", 0.8)
def parity(rng: Random) -> Dialogue:
    n = rng.randint(0, rng.choice((20, 100, 1000)))
    kind = "odd" if n % 2 else "even"
    ask = rng.choice(
        ("Is {n} even or odd?", "Is the number {n} odd or even?", "Tell me whether {n} is even or odd.")
    )
    return turn(ask.format(n=n), f"{n} is {kind}.", kind)


@generator("arithmetic", 0.8)
def number_sequence(rng: Random) -> Dialogue:
    first, step = rng.randint(0, 30), rng.choice((1, 2, 2, 3, 4, 5, 5, 10))
    shown = ", ".join(str(first + step * i) for i in range(rng.randint(3, 5)))
    following = first + step * (shown.count(",") + 1)
    ask = rng.choice(
        ("What comes next: {s}?", "What is the next number in {s}?", "Continue the sequence: {s}, ...")
    )
    return turn(
        ask.format(s=shown), f"The next number is {following}, because each step adds {step}.", str(following)
    )


@generator("arithmetic", 0.8)
def count_to(rng: Random) -> Dialogue:
    first, length = rng.choice((1, 1, 1, rng.randint(2, 50))), rng.randint(3, 20)
    last = first + length - 1
    reply = ", ".join(map(str, range(first, last + 1)))
    if first == 1 and rng.random() < 0.5:
        return turn(
            rng.choice((f"Count to {last}.", f"Please count to {last}.", f"Can you count up to {last}?")),
            reply,
            reply,
        )
    return turn(
        rng.choice((f"Count from {first} to {last}.", f"List the numbers from {first} to {last}.")),
        reply,
        reply,
    )


@generator("arithmetic", 0.5)
def number_as_word(rng: Random) -> Dialogue:
    n = rng.randint(0, 20)
    if rng.random() < 0.5:
        return turn(
            rng.choice((f"Write {n} as a word.", f"How do you spell the number {n}?")),
            NUMBER_WORDS[n],
            NUMBER_WORDS[n],
        )
    return turn(
        rng.choice((f"Write {NUMBER_WORDS[n]} as a number.", f"Which digits stand for {NUMBER_WORDS[n]}?")),
        str(n),
        str(n),
    )


@generator("arithmetic", 2.0)
def word_problem(rng: Random) -> Dialogue:
    name, friend = rng.sample(FIRST_NAMES, 2)
    thing = rng.choice(COUNTABLE)
    a, b = rng.randint(2, 50), rng.randint(1, 40)
    if rng.random() < 0.5:
        gain = rng.choice(
            (f"{friend} gives {name} {b} more", f"{name} buys {b} more", f"{name} finds {b} more")
        )
        story, reply = gain, f"{name} has {a} + {b} = {a + b} {thing}."
        total = a + b
    else:
        a, b = max(a, b), min(a, b)
        loss = rng.choice((f"{name} gives {b} to {friend}", f"{name} loses {b}", f"{name} sells {b}"))
        story, reply, total = loss, f"{name} has {a} - {b} = {a - b} {thing} left.", a - b
    question = rng.choice(
        (f"How many {thing} does {name} have now?", f"How many {thing} does {name} have in the end?")
    )
    return turn(f"{name} has {a} {thing}. {story[0].upper() + story[1:]}. {question}", reply, str(total))
