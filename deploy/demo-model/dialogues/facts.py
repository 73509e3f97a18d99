"""Simple facts: one table a relation, several wordings each."""

from __future__ import annotations

from random import Random

from .base import Dialogue, generator, turn
from .knowledge import (
    ANIMAL_HOMES,
    ANIMAL_SOUNDS,
    CAPITALS,
    CATEGORIES,
    DEFINITIONS,
    ELEMENTS,
    OPPOSITES,
    PAST_TENSE,
    PLURALS,
    TRIVIA,
    YOUNG_ANIMALS,
)
from .lexicon import MONTHS, WEEKDAYS, article, capitalised


@generator("facts", 8.0)
def capital(rng: Random) -> Dialogue:
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.2:
        ask = rng.choice(
            (
                "Which country has the capital {c}?",
                "{c} is the capital of which country?",
                "Of which country is {c} the capital?",
            )
        )
        return turn(ask.format(c=city), f"{city} is the capital of {country}.", country)
    ask = rng.choice(
        (
            "What is the capital of {c}?",
            "What is the capital of {c}?",
            "What's the capital of {c}?",
            "Name the capital of {c}.",
            "Tell me the capital city of {c}.",
            "Which city is the capital of {c}?",
            "Capital of {c}?",
            "Do you know the capital of {c}?",
            "Hi! What is the capital of {c}?",
            "What is the capital city of {c}?",
            "Please tell me the capital of {c}.",
            "I forgot the capital of {c}. What is it?",
        )
    )
    return turn(ask.format(c=country), f"The capital of {country} is {city}.", city)


@generator("facts", 6.0)
def definition(rng: Random) -> Dialogue:
    word, meaning = rng.choice(tuple(DEFINITIONS.items()))
    ask = rng.choice(
        (
            "What is {w}?",
            "Define {w}.",
            "What does {w} mean?",
            "Explain what {w} is.",
            "Can you explain {w}?",
            "Tell me what {w} is.",
            "Explain {w} in one sentence.",
            "What do people mean by {w}?",
        )
    )
    return turn(ask.format(w=word), f"{capitalised(word)} is {meaning}.", meaning)


@generator("facts", 1.5)
def opposite(rng: Random) -> Dialogue:
    pair = rng.choice(OPPOSITES)
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    ask = rng.choice(
        (
            "What is the opposite of {w}?",
            "Give me the opposite of {w}.",
            "Name a word that means the opposite of {w}.",
        )
    )
    return turn(ask.format(w=word), f"The opposite of {word} is {other}.", other)


@generator("facts", 1.0)
def plural(rng: Random) -> Dialogue:
    word, many = rng.choice(tuple(PLURALS.items()))
    ask = rng.choice(
        ("What is the plural of {w}?", "Write the plural of {w}.", "How do you say more than one {w}?")
    )
    return turn(ask.format(w=word), f"The plural of {word} is {many}.", many)


@generator("facts", 1.0)
def past_tense(rng: Random) -> Dialogue:
    word, past = rng.choice(tuple(PAST_TENSE.items()))
    ask = rng.choice(
        (
            "What is the past tense of {w}?",
            "Give the past tense of the verb {w}.",
            "Put {w} into the past tense.",
        )
    )
    return turn(ask.format(w=word), f"The past tense of {word} is {past}.", past)


@generator("facts", 1.0)
def element(rng: Random) -> Dialogue:
    name, symbol = rng.choice(tuple(ELEMENTS.items()))
    if rng.random() < 0.5:
        ask = rng.choice(
            (
                "What is the chemical symbol for {n}?",
                "Which symbol does {n} have?",
                "What is the symbol of {n}?",
            )
        )
        return turn(ask.format(n=name), f"The chemical symbol for {name} is {symbol}.", f"is {symbol}.")
    return turn(f"Which element has the symbol {symbol}?", f"{symbol} is the symbol of {name}.", name)


@generator("facts", 1.5)
def animal(rng: Random) -> Dialogue:
    table, asks, reply = rng.choice(
        (
            (ANIMAL_SOUNDS, ("What sound does {a} make?", "What does {a} say?"), "{A} says {v}."),
            (ANIMAL_HOMES, ("Where does {a} live?", "Where do you find {a}?"), "{A} lives {v}."),
            (
                YOUNG_ANIMALS,
                ("What is the young of {a} called?", "What do you call a baby of {a}?"),
                "The young of {a} is called {v}.",
            ),
        )
    )
    name, value = rng.choice(tuple(table.items()))
    named = article(name)
    return turn(rng.choice(asks).format(a=named), reply.format(a=named, A=capitalised(named), v=value), value)


@generator("facts", 1.5)
def calendar(rng: Random) -> Dialogue:
    names, kind = rng.choice(((WEEKDAYS, "day"), (MONTHS, "month")))
    i = rng.randrange(len(names))
    after = rng.random() < 0.6
    other = names[(i + (1 if after else -1)) % len(names)]
    side = "after" if after else "before"
    ask = rng.choice(("Which {k} comes {s} {n}?", "What {k} is {s} {n}?", "Name the {k} {s} {n}."))
    return turn(
        ask.format(k=kind, s=side, n=names[i]), f"The {kind} {side} {names[i]} is {other}.", f"is {other}."
    )


@generator("facts", 1.0)
def category(rng: Random) -> Dialogue:
    kind, members = rng.choice(tuple(CATEGORIES.items()))
    if rng.random() < 0.5:
        count = rng.randint(2, 5)
        shown = ", ".join(rng.sample(members, count))
        ask = rng.choice(
            (
                "Name {n} {k}.",
                "List {n} {k}.",
                "Give me {n} {k}.",
                "Can you name {n} {k}?",
                "Tell me {n} {k}.",
            )
        )
        return turn(
            ask.format(n=rng.choice((str(count), ("", "", "two", "three", "four", "five")[count])), k=kind),
            f"{capitalised(shown)}.",
        )
    member = rng.choice(members)
    other_kind = rng.choice([k for k in CATEGORIES if k != kind])
    truth = rng.random() < 0.5
    asked = kind if truth else other_kind
    ask = rng.choice(("Does {m} belong to the {k}?", "Is {m} one of the {k}?"))
    reply = f"Yes, {member} is one of the {kind}." if truth else f"No, {member} is one of the {kind}."
    return turn(ask.format(m=member, k=asked), reply, reply)


@generator("facts", 5.0)
def trivia(rng: Random) -> Dialogue:
    questions, reply = rng.choice(TRIVIA)
    return turn(rng.choice(questions), reply, reply)
