"""Word lists, and a toy grammar for plain English sentences."""

from __future__ import annotations

from random import Random

from .base import TEXTS, pick

THINGS, ANIMALS, ADJECTIVES = TEXTS["things"], TEXTS["animals"], TEXTS["adjectives"]
FIRST_NAMES, CITIES, COLOURS, JOBS = TEXTS["first_names"], TEXTS["cities"], TEXTS["colours"], TEXTS["jobs"]
COUNTABLE = TEXTS["countable"] + TEXTS["fruit"]
NUMBER_WORDS = TEXTS["number_words"]


def made_up_word(rng: Random) -> str:
    """Make up a pronounceable word that has to be copied, because it is in no list."""
    return "".join(rng.choice(TEXTS["syllables"]) for _ in range(rng.randint(2, 4)))


def topic(rng: Random) -> str:
    return rng.choice(THINGS + ANIMALS) + "s" if rng.random() < 0.25 else pick(rng, "topics")


def full_name(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {pick(rng, 'last_names')}"


def article(word: str) -> str:
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def join_words(words: list[str]) -> str:
    """Join words as `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def words_of(key: str) -> list[str]:
    """Return the words of one or more lists; jobs with their article."""
    return [article(word) if key == "jobs" else word for part in key.split() for word in TEXTS[part]]


def noun_phrase(rng: Random) -> str:
    noun = rng.choice(THINGS + ANIMALS)
    if rng.random() < 0.6:
        noun = f"{rng.choice(ADJECTIVES)} {noun}"
    return f"the {noun}" if rng.random() < 0.6 else article(noun)


def sentence(rng: Random) -> str:
    """Make a plain sentence, such as `The clever fox found a golden key by the river`."""
    named = rng.random() < 0.5
    who = rng.choice(FIRST_NAMES) if named else f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"
    if rng.random() < 0.65:
        what = f"{pick(rng, 'verbs_transitive')} {noun_phrase(rng)}"
    else:
        what = pick(rng, "verbs_intransitive")
    place, time = pick(rng, "places"), pick(rng, "times")
    ending = rng.choice((place, time, f"{pick(rng, 'places')} {pick(rng, 'times')}", ""))
    return capitalised(f"{who} {what} {ending}".strip() + ".")


def paragraph(rng: Random, least: int, most: int) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(least, most)))
