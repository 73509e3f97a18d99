"""Copies and small rewrites of text in the prompt."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .base import Dialogue, pick, turn
from .facts import trivia
from .words import ADJECTIVES, ANIMALS, FIRST_NAMES, THINGS, made_up_word, paragraph, sentence


def _identifier(rng: Random) -> str:
    return "".join(rng.choice("abcdefghjkmnpqrstuvwxyz0123456789") for _ in range(rng.randint(4, 10)))


def _words(rng: Random) -> str:
    pool = THINGS + ANIMALS + ADJECTIVES
    return " ".join(
        made_up_word(rng) if rng.random() < 0.5 else rng.choice(pool) for _ in range(rng.randint(1, 12))
    )


_TEXTS: tuple[Callable[[Random], str], ...] = (
    sentence,
    sentence,
    lambda rng: paragraph(rng, 2, 5),
    _words,
    _identifier,
    lambda rng: " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(2, 10))),
    lambda rng: "\n".join(f"{_identifier(rng)} = {rng.randint(0, 999)}" for _ in range(rng.randint(1, 4))),
)


def _some_text(rng: Random) -> str:
    return rng.choice(_TEXTS)(rng)


def _some_word(rng: Random) -> str:
    return made_up_word(rng) if rng.random() < 0.5 else rng.choice(THINGS + ANIMALS)


def repeat(rng: Random) -> Dialogue:
    text = _some_text(rng)
    return turn(pick(rng, "repeat", t=text), text)


def repeat_times(rng: Random) -> Dialogue:
    text, times = rng.choice((rng.choice(THINGS), made_up_word(rng), sentence(rng))), rng.randint(2, 5)
    result = ("\n" if text.endswith(".") else " ").join([text] * times)
    return turn(pick(rng, "repeat_times", n=times, t=text), result)


def repeat_long(rng: Random) -> Dialogue:
    text = "\n\n".join(paragraph(rng, 2, 6) for _ in range(rng.randint(2, 4)))
    return turn(pick(rng, "repeat_long", t=text), text)


def repeat_earlier(rng: Random) -> Dialogue:
    """Ask for a text from two turns ago."""
    text, other = _some_text(rng), trivia(rng)
    first, again = turn(f"Repeat after me: {text}", text), turn(pick(rng, "repeat_earlier"), text)
    return Dialogue(first.messages + other.messages + again.messages)


def quote_back(rng: Random) -> Dialogue:
    text = sentence(rng)
    return turn(pick(rng, "quote_back", t=text), f'"{text}"')


_CASES = {
    "in upper case": str.upper,
    "in capital letters": str.upper,
    "in lower case": str.lower,
    "in small letters": str.lower,
}


def letter_case(rng: Random) -> Dialogue:
    text = sentence(rng) if rng.random() < 0.4 else _words(rng)
    words = rng.choice(list(_CASES))
    return turn(pick(rng, "letter_case", w=words, t=text), _CASES[words](text))


def spell(rng: Random) -> Dialogue:
    word = _some_word(rng)
    return turn(pick(rng, "spell", w=word), "-".join(word))


def first_letter(rng: Random) -> Dialogue:
    word = _some_word(rng)
    which, letter = rng.choice((("first", word[0]), ("last", word[-1])))
    ask = f"What is the {which} letter of {word}?"
    return turn(ask, f"The {which} letter of {word} is {letter}.")


def replace_word(rng: Random) -> Dialogue:
    text = sentence(rng) if rng.random() < 0.6 else paragraph(rng, 2, 4)
    old = rng.choice([w.strip(".,") for w in text.split() if len(w.strip(".,")) >= 3])
    new = rng.choice(THINGS + ANIMALS + ADJECTIVES + FIRST_NAMES)
    result = " ".join(w.replace(old, new) if w.strip(".,") == old else w for w in text.split())
    return turn(pick(rng, "replace_word", o=old, n=new, t=text), result)


def fix_typo(rng: Random) -> Dialogue:
    """Swap two neighbouring letters inside one common word."""
    text = f"{sentence(rng)[:-1]} {pick(rng, 'sentence_ends')}."
    words = text.split()
    index = rng.choice([i for i, w in enumerate(words) if len(w) > 4])
    word = words[index]
    at = rng.randrange(1, len(word.strip(".")) - 2)
    words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return turn(pick(rng, "fix_typo", t=" ".join(words)), text)


def sentence_number(rng: Random) -> Dialogue:
    sentences = [sentence(rng) for _ in range(rng.randint(3, 5))]
    word, index = rng.choice((("first", 0), ("second", 1), ("third", 2), ("last", -1)))
    return turn(pick(rng, "sentence_number", w=word, t=" ".join(sentences)), sentences[index])


def polite(rng: Random) -> Dialogue:
    action, ask = pick(rng, "orders"), pick(rng, "polite", t="{t}")
    order = action.capitalize() + rng.choice((".", "!", " now!"))
    return turn(ask.format(t=order), f"Could you please {action}?")


def summary(rng: Random) -> Dialogue:
    """Ask for a summary, which keeps the first and the last sentence."""
    sentences = [sentence(rng) for _ in range(rng.randint(4, 7))]
    last = sentences[-1]
    ending = last[0].lower() + last[1:] if last.startswith("The ") else last
    return turn(pick(rng, "summary", t=" ".join(sentences)), f"{sentences[0]} In the end, {ending}")
