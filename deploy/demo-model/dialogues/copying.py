"""Tasks whose answer is mostly a copy of the prompt, and small rewrites of it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .base import Dialogue, generator, turn
from .lexicon import ADJECTIVES, ANIMALS, FIRST_NAMES, THINGS, made_up_word, paragraph, sentence


def _identifier(rng: Random) -> str:
    return "".join(rng.choice("abcdefghjkmnpqrstuvwxyz0123456789") for _ in range(rng.randint(4, 10)))


def _words(rng: Random) -> str:
    return " ".join(
        made_up_word(rng) if rng.random() < 0.5 else rng.choice(THINGS + ANIMALS + ADJECTIVES)
        for _ in range(rng.randint(1, 12))
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


def some_text(rng: Random) -> str:
    return rng.choice(_TEXTS)(rng)


@generator("copying", 7.0)
def repeat(rng: Random) -> Dialogue:
    text = some_text(rng)
    ask = rng.choice(
        (
            "Repeat after me: {t}",
            "Repeat the following text: {t}",
            "Say this back to me: {t}",
            "Echo: {t}",
            "Copy this text exactly:\n{t}",
            "Repeat this word for word:\n\n{t}",
            "Please write exactly this: {t}",
            "Say: {t}",
            "Print the following.\n{t}",
        )
    )
    return turn(ask.format(t=text), text, text)


@generator("copying", 1.0)
def repeat_times(rng: Random) -> Dialogue:
    text, times = rng.choice((rng.choice(THINGS), made_up_word(rng), sentence(rng))), rng.randint(2, 5)
    separator = "\n" if text.endswith(".") else " "
    result = separator.join([text] * times)
    return turn(
        rng.choice(("Repeat {n} times: {t}", "Write this {n} times: {t}")).format(n=times, t=text),
        result,
        result,
    )


@generator("copying", 1.0)
def quote_back(rng: Random) -> Dialogue:
    text = sentence(rng)
    ask = rng.choice(("Put this in quotes: {t}", "Quote this sentence: {t}"))
    return turn(ask.format(t=text), f'"{text}"', f'"{text}"')


_CASES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("in upper case", str.upper),
    ("in capital letters", str.upper),
    ("in lower case", str.lower),
    ("in small letters", str.lower),
)


@generator("copying", 1.5)
def letter_case(rng: Random) -> Dialogue:
    text = sentence(rng) if rng.random() < 0.4 else _words(rng)
    words, change = rng.choice(_CASES)
    result = change(text)
    return turn(
        rng.choice(("Write this {w}: {t}", "Rewrite the text {w}: {t}")).format(w=words, t=text),
        result,
        result,
    )


@generator("copying", 1.0)
def spell(rng: Random) -> Dialogue:
    word = made_up_word(rng) if rng.random() < 0.5 else rng.choice(THINGS + ANIMALS)
    result = "-".join(word)
    return turn(
        rng.choice(("Spell the word {w}.", "How do you spell {w}?", "Spell {w} letter by letter.")).format(
            w=word
        ),
        result,
        result,
    )


@generator("copying", 1.0)
def first_letter(rng: Random) -> Dialogue:
    word = made_up_word(rng) if rng.random() < 0.5 else rng.choice(THINGS + ANIMALS)
    which, letter = rng.choice((("first", word[0]), ("last", word[-1])))
    return turn(
        f"What is the {which} letter of {word}?",
        f"The {which} letter of {word} is {letter}.",
        f"is {letter}.",
    )


@generator("rewriting", 2.0)
def replace_word(rng: Random) -> Dialogue:
    text = sentence(rng) if rng.random() < 0.6 else paragraph(rng, 2, 4)
    old = rng.choice([w.strip(".,") for w in text.split() if len(w.strip(".,")) >= 3])
    new = rng.choice(THINGS + ANIMALS + ADJECTIVES + FIRST_NAMES)
    result = " ".join(w.replace(old, new) if w.strip(".,") == old else w for w in text.split())
    ask = rng.choice(
        (
            "Replace {o} with {n}: {t}",
            "In this text, change {o} to {n}: {t}",
            "Rewrite the text with {n} instead of {o}.\n{t}",
        )
    )
    return turn(ask.format(o=old, n=new, t=text), result, result)


@generator("rewriting", 1.5)
def fix_typo(rng: Random) -> Dialogue:
    """Two neighbouring letters inside one common word are swapped."""
    text = f"{sentence(rng)[:-1]} {rng.choice(('again', 'alone', 'quickly', 'together', 'without a word'))}."
    words = text.split()
    index = rng.choice([i for i, w in enumerate(words) if len(w) > 4])
    word = words[index]
    at = rng.randrange(1, len(word.strip(".")) - 2)
    words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    ask = rng.choice(
        (
            "Fix the spelling: {t}",
            "Correct the typos in this sentence: {t}",
            "Proofread: {t}",
            "Correct this: {t}",
        )
    )
    return turn(ask.format(t=" ".join(words)), text, text)


@generator("rewriting", 1.0)
def sentence_number(rng: Random) -> Dialogue:
    sentences = [sentence(rng) for _ in range(rng.randint(3, 5))]
    word, index = rng.choice((("first", 0), ("second", 1), ("third", 2), ("last", -1)))
    ask = rng.choice(("What is the {w} sentence of this text?\n{t}", "Copy only the {w} sentence:\n{t}"))
    return turn(ask.format(w=word, t=" ".join(sentences)), sentences[index], sentences[index])


@generator("rewriting", 1.0)
def polite(rng: Random) -> Dialogue:
    action = rng.choice(
        (
            "close the door",
            "send me the file",
            "open the window",
            "call me back",
            "read this letter",
            "wait outside",
            "help me with this",
            "check the numbers",
            "turn off the light",
            "bring the report",
            "fix the bug",
            "review my code",
        )
    )
    result = f"Could you please {action}?"
    ask = rng.choice(
        ("Make this more polite: {t}", "Rewrite this politely: {t}", "Say this in a friendly way: {t}")
    )
    return turn(ask.format(t=action.capitalize() + rng.choice((".", "!", " now!"))), result, result)


@generator("rewriting", 1.5)
def summary(rng: Random) -> Dialogue:
    """Ask for a summary, which keeps the first and the last sentence."""
    sentences = [sentence(rng) for _ in range(rng.randint(4, 7))]
    result = f"{sentences[0]} In the end, {sentences[-1][0].lower() if sentences[-1].startswith('The ') else sentences[-1][0]}{sentences[-1][1:]}"
    ask = rng.choice(
        (
            "Summarize this text:\n{t}",
            "Give a short summary: {t}",
            "Summarize: {t}",
            "Please summarize the following text.\n\n{t}",
        )
    )
    return turn(ask.format(t=" ".join(sentences)), result, result)
