"""Sorting, counting and picking from short lists."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from .base import TEXTS, Dialogue, pick, turn
from .words import ANIMALS, COLOURS, JOBS, THINGS, made_up_word


def _words(rng: Random, least: int = 3, most: int = 7) -> list[str]:
    pool = rng.choice((ANIMALS, COLOURS, TEXTS["fruit"], JOBS, THINGS, THINGS + ANIMALS))
    words: list[str] = rng.sample(pool, min(rng.randint(least, most), len(pool)))
    if rng.random() < 0.2:
        words[rng.randrange(len(words))] = made_up_word(rng)
    return words


def _numbers(rng: Random, most: int = 7) -> list[int]:
    return rng.sample(range(1, rng.choice((10, 100, 100, 1000))), rng.randint(3, most))


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def sort_numbers(rng: Random) -> Dialogue:
    values, falling = _numbers(rng), rng.random() < 0.3
    key = "sort_numbers_down" if falling else "sort_numbers"
    return turn(pick(rng, key, v=_listed(values)), _listed(sorted(values, reverse=falling)))


def sort_words(rng: Random) -> Dialogue:
    words = _words(rng)
    return turn(pick(rng, "sort_words", v=_listed(words)), _listed(sorted(words)))


def count_items(rng: Random) -> Dialogue:
    words = _words(rng, 2, 9)
    ask = pick(rng, "count_items", v=_listed(words))
    return turn(ask, f"There are {len(words)} items.")


_PLACES = {"first": 0, "last": -1, "second": 1, "third": 2}


def pick_number(rng: Random) -> Dialogue:
    values, word = _numbers(rng), rng.choice(("largest", "biggest", "smallest", *_PLACES))
    result = values[_PLACES[word]] if word in _PLACES else min(values) if word == "smallest" else max(values)
    ask = pick(rng, "pick_number", w=word, v=_listed(values))
    return turn(ask, f"The {word} number is {result}.")


def pick_word(rng: Random) -> Dialogue:
    words = _words(rng)
    word = rng.choice(list(_PLACES))
    result = words[_PLACES[word]]
    ask = pick(rng, "pick_word", w=word, v=_listed(words))
    return turn(ask, f"The {word} item is {result}.")


def reverse_list(rng: Random) -> Dialogue:
    values = _words(rng) if rng.random() < 0.6 else _numbers(rng)
    return turn(pick(rng, "reverse_list", v=_listed(values)), _listed(values[::-1]))


def sum_of_list(rng: Random) -> Dialogue:
    values = [rng.randint(1, 20) for _ in range(rng.randint(3, 4))]
    ask = pick(rng, "sum_of_list", v=_listed(values))
    return turn(ask, f"{' + '.join(map(str, values))} = {sum(values)}")


def contains(rng: Random) -> Dialogue:
    words, present = _words(rng), rng.random() < 0.5
    probe = rng.choice(words) if present else rng.choice([w for w in THINGS + ANIMALS if w not in words])
    reply = f"Yes, {probe} is in the list." if present else f"No, {probe} is not in the list."
    return turn(pick(rng, "contains", p=probe, v=_listed(words)), reply)


def bullet_list(rng: Random) -> Dialogue:
    words, numbered = _words(rng), rng.random() < 0.5
    result = "\n".join(f"{i}. {w}" if numbered else f"- {w}" for i, w in enumerate(words, 1))
    kind = "a numbered list" if numbered else "a bullet list"
    return turn(pick(rng, "bullet_list", k=kind, v=_listed(words)), result)


def remove_item(rng: Random) -> Dialogue:
    words = _words(rng, 4, 7)
    gone = rng.choice(words)
    ask = pick(rng, "remove_item", g=gone, v=_listed(words))
    return turn(ask, _listed([w for w in words if w != gone]))


def add_item(rng: Random) -> Dialogue:
    words, extra = _words(rng, 2, 6), made_up_word(rng)
    front = rng.random() < 0.3
    ask = pick(rng, "add_item", x=extra, w="front" if front else "end", v=_listed(words))
    return turn(ask, _listed([extra, *words] if front else [*words, extra]))
