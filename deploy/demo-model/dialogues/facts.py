"""Simple facts, and general explanations for any topic."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .base import TEXTS, Dialogue, pick, turn
from .words import article, capitalised, join_words, made_up_word, topic


def _item(rng: Random, key: str) -> tuple[str, str]:
    found: tuple[str, str] = rng.choice(list(TEXTS[key].items()))
    return found


def capital(rng: Random) -> Dialogue:
    country, city = _item(rng, "capitals")
    if rng.random() < 0.2:
        return turn(pick(rng, "capital_of", c=city), f"{city} is the capital of {country}.")
    return turn(pick(rng, "capital", c=country), f"The capital of {country} is {city}.")


def _table(table: str, key: str, reply: str) -> Callable[[Random], Dialogue]:
    """Return a generator of questions about the entries of a table."""

    def make(rng: Random) -> Dialogue:
        word, value = _item(rng, table)
        return turn(pick(rng, key, w=word), reply.format(w=word, W=capitalised(word), v=value))

    return make


definition = _table("definitions", "definition", "{W} is {v}.")
plural = _table("plurals", "plural", "The plural of {w} is {v}.")
past_tense = _table("past_tense", "past_tense_of", "The past tense of {w} is {v}.")


def opposite(rng: Random) -> Dialogue:
    pair = _item(rng, "opposites")
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    return turn(pick(rng, "opposite", w=word), f"The opposite of {word} is {other}.")


def element(rng: Random) -> Dialogue:
    name, symbol = _item(rng, "elements")
    if rng.random() < 0.5:
        reply = f"The chemical symbol for {name} is {symbol}."
        return turn(pick(rng, "element", n=name), reply)
    return turn(f"Which element has the symbol {symbol}?", f"{symbol} is the symbol of {name}.")


_ANIMALS = (
    ("animal_sounds", "animal_sound", "{A} says {v}."),
    ("animal_homes", "animal_home", "{A} lives {v}."),
    ("young_animals", "young_animal", "The young of {a} is called {v}."),
)


def animal(rng: Random) -> Dialogue:
    table, key, reply = rng.choice(_ANIMALS)
    name, value = _item(rng, table)
    named = article(name)
    return turn(pick(rng, key, a=named), reply.format(a=named, A=capitalised(named), v=value))


def calendar(rng: Random) -> Dialogue:
    names, kind = rng.choice(((TEXTS["weekdays"], "day"), (TEXTS["months"], "month")))
    i = rng.randrange(len(names))
    side, step = ("after", 1) if rng.random() < 0.6 else ("before", -1)
    other = names[(i + step) % len(names)]
    ask = pick(rng, "calendar", k=kind, s=side, n=names[i])
    return turn(ask, f"The {kind} {side} {names[i]} is {other}.")


def category(rng: Random) -> Dialogue:
    kind, members = _item(rng, "categories")
    if rng.random() < 0.5:
        count = rng.randint(2, 5)
        shown = ", ".join(rng.sample(members, count))
        ask = pick(rng, "category", n="{n}", k=kind)
        number = rng.choice((str(count), TEXTS["number_words"][count]))
        return turn(ask.format(n=number), f"{capitalised(shown)}.")
    member = rng.choice(members)
    other_kind = rng.choice([k for k in TEXTS["categories"] if k != kind])
    truth = rng.random() < 0.5
    ask = pick(rng, "member", m=member, k=kind if truth else other_kind)
    return turn(ask, f"{'Yes' if truth else 'No'}, {member} is one of the {kind}.")


def trivia(rng: Random) -> Dialogue:
    reply, questions = _item(rng, "trivia")
    return turn(rng.choice(questions), reply)


def _any_topic(rng: Random) -> str:
    return made_up_word(rng) if rng.random() < 0.15 else topic(rng)


def about_topic(rng: Random) -> Dialogue:
    t = _any_topic(rng)
    middle = TEXTS["about_middle"]
    parts = [pick(rng, "about_first", t=t, T=capitalised(t)), *rng.sample(middle, rng.randint(1, 4))]
    text = " ".join([*parts, pick(rng, "about_last", t=t)])
    return turn(pick(rng, "about_topic", t=t), text)


def tips(rng: Random) -> Dialogue:
    t, count = _any_topic(rng), rng.randint(3, 5)
    ask = pick(rng, "tips", n="{n}", t=t)
    lines = "\n".join(f"{i}. {tip}" for i, tip in enumerate(rng.sample(TEXTS["tip"], count), 1))
    number = rng.choice((str(count), TEXTS["number_words"][count]))
    return turn(ask.format(n=number), f"Here are {count} tips for {t}:\n{lines}")


def pros_and_cons(rng: Random) -> Dialogue:
    t = _any_topic(rng)
    ask = pick(rng, "pros_and_cons", t=t)
    good, bad = join_words(rng.sample(TEXTS["good"], 2)), join_words(rng.sample(TEXTS["bad"], 2))
    return turn(ask, f"There are two sides to {t}.\nPros: {good}.\nCons: {bad}.")


def how_to(rng: Random) -> Dialogue:
    task, steps = _item(rng, "steps")
    lines = "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1))
    return turn(pick(rng, "how_to", t=task), f"Here is how to {task}:\n{lines}")
