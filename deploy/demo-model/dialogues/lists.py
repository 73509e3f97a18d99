"""Sorting, counting and picking from short lists."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .base import Dialogue, generator, turn
from .lexicon import ANIMALS, COLOURS, FRUIT, JOBS, THINGS, made_up_word


def _words(rng: Random, least: int = 3, most: int = 7) -> list[str]:
    pool = rng.choice((ANIMALS, COLOURS, FRUIT, JOBS, THINGS, THINGS + ANIMALS))
    words = rng.sample(pool, min(rng.randint(least, most), len(pool)))
    if rng.random() < 0.2:
        words[rng.randrange(len(words))] = made_up_word(rng)
    return words


def _numbers(rng: Random, most: int = 7) -> list[int]:
    return rng.sample(range(1, rng.choice((10, 100, 100, 1000))), rng.randint(3, most))


def _listed(values: list[int] | list[str]) -> str:
    return ", ".join(map(str, values))


@generator("lists", 2.0)
def sort_numbers(rng: Random) -> Dialogue:
    values, falling = _numbers(rng), rng.random() < 0.3
    ordered = _listed(sorted(values, reverse=falling))
    if falling:
        ask = rng.choice(
            ("Sort these numbers from largest to smallest: {v}", "Sort in descending order: {v}")
        )
    else:
        ask = rng.choice(
            (
                "Sort these numbers: {v}",
                "Sort in ascending order: {v}",
                "Please sort {v}.",
                "Put these numbers in order: {v}",
                "Order the numbers {v} from smallest to largest.",
            )
        )
    return turn(ask.format(v=_listed(values)), ordered, ordered)


@generator("lists", 1.5)
def sort_words(rng: Random) -> Dialogue:
    words = _words(rng)
    ordered = _listed(sorted(words))
    ask = rng.choice(
        (
            "Sort these words alphabetically: {v}",
            "Put these words in alphabetical order: {v}",
            "Sort: {v}",
            "Please sort the following words from A to Z: {v}",
        )
    )
    return turn(ask.format(v=_listed(words)), ordered, ordered)


@generator("lists", 1.5)
def count_items(rng: Random) -> Dialogue:
    words = _words(rng, 2, 9)
    ask = rng.choice(
        (
            "How many items are in this list: {v}?",
            "Count the words: {v}",
            "How many words are there? {v}",
            "Count the items in the list {v}.",
        )
    )
    return turn(ask.format(v=_listed(words)), f"There are {len(words)} items.", str(len(words)))


_PICKS: dict[str, Callable[[list[int]], int]] = {
    "largest": max,
    "biggest": max,
    "smallest": min,
    "first": lambda v: v[0],
    "last": lambda v: v[-1],
    "second": lambda v: v[1],
    "third": lambda v: v[2],
}


@generator("lists", 2.0)
def pick_number(rng: Random) -> Dialogue:
    values, word = _numbers(rng), rng.choice(tuple(_PICKS))
    result = _PICKS[word](values)
    ask = rng.choice(
        (
            "What is the {w} number in {v}?",
            "Which is the {w} of these numbers: {v}?",
            "Find the {w} number: {v}",
        )
    )
    return turn(ask.format(w=word, v=_listed(values)), f"The {word} number is {result}.", f"is {result}.")


@generator("lists", 1.5)
def pick_word(rng: Random) -> Dialogue:
    words = _words(rng)
    word, position = rng.choice((("first", 0), ("last", -1), ("second", 1), ("third", 2)))
    ask = rng.choice(
        ("What is the {w} word in this list: {v}?", "Name the {w} item: {v}", "Which item comes {w}? {v}")
    )
    return turn(
        ask.format(w=word, v=_listed(words)),
        f"The {word} item is {words[position]}.",
        f"is {words[position]}.",
    )


@generator("lists", 1.0)
def reverse_list(rng: Random) -> Dialogue:
    words: list[str] = _words(rng) if rng.random() < 0.6 else [str(n) for n in _numbers(rng)]
    result = _listed(words[::-1])
    return turn(
        rng.choice(("Reverse this list: {v}", "Write this list backwards: {v}")).format(v=_listed(words)),
        result,
        result,
    )


@generator("lists", 1.0)
def sum_of_list(rng: Random) -> Dialogue:
    values = [rng.randint(1, 20) for _ in range(rng.randint(3, 4))]
    ask = rng.choice(("What is the sum of {v}?", "Add up these numbers: {v}", "Add {v}."))
    total = sum(values)
    return turn(ask.format(v=_listed(values)), f"{' + '.join(map(str, values))} = {total}", str(total))


@generator("lists", 1.0)
def contains(rng: Random) -> Dialogue:
    words, present = _words(rng), rng.random() < 0.5
    probe = rng.choice(words) if present else rng.choice([w for w in THINGS + ANIMALS if w not in words])
    ask = rng.choice(("Is {p} in this list? {v}", "Does the list {v} contain {p}?"))
    reply = f"Yes, {probe} is in the list." if present else f"No, {probe} is not in the list."
    return turn(ask.format(p=probe, v=_listed(words)), reply, reply[:3].strip(","))


@generator("lists", 1.0)
def bullet_list(rng: Random) -> Dialogue:
    words, numbered = _words(rng), rng.random() < 0.5
    result = "\n".join(f"{i}. {w}" if numbered else f"- {w}" for i, w in enumerate(words, 1))
    kind = "a numbered list" if numbered else "a bullet list"
    return turn(
        rng.choice(("Turn this into {k}: {v}", "Write {v} as {k}.")).format(k=kind, v=_listed(words)),
        result,
        result,
    )


@generator("lists", 1.0)
def remove_item(rng: Random) -> Dialogue:
    words = _words(rng, 4, 7)
    gone = rng.choice(words)
    result = _listed([w for w in words if w != gone])
    return turn(
        rng.choice(("Remove {g} from this list: {v}", "Write this list without {g}: {v}")).format(
            g=gone, v=_listed(words)
        ),
        result,
        result,
    )


@generator("lists", 0.8)
def add_item(rng: Random) -> Dialogue:
    words, extra = _words(rng, 2, 6), made_up_word(rng)
    front = rng.random() < 0.3
    result = _listed([extra, *words] if front else [*words, extra])
    where = "front" if front else "end"
    return turn(
        rng.choice(("Add {x} to the {w} of this list: {v}", "Put {x} at the {w} of the list {v}")).format(
            x=extra, w=where, v=_listed(words)
        ),
        result,
        result,
    )
