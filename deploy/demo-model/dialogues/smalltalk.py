"""Greetings, thanks, questions about the assistant, advice, and facts that the user told earlier."""

from __future__ import annotations

from random import Random

from .base import TEXTS, Dialogue, Message, pick, turn
from .words import FIRST_NAMES, topic, words_of


def greeting(rng: Random) -> Dialogue:
    greet = pick(rng, "greet") + rng.choice(("", "", "!", ".", "!"))
    if rng.random() < 0.2:
        greet = greet.lower()
    if rng.random() < 0.25:
        name = rng.choice(FIRST_NAMES)
        return turn(f"{greet} {pick(rng, 'my_name', n=name)}", f"Hello {name}! {pick(rng, 'offer')}")
    return turn(greet, f"{pick(rng, 'greet_back')} {pick(rng, 'offer')}")


def about_the_assistant(rng: Random) -> Dialogue:
    reply, asks = rng.choice(list(TEXTS["about"].items()))
    ask = rng.choice(asks)
    if rng.random() < 0.2:
        ask = f"{pick(rng, 'greet')}! {ask}"
    return turn(ask, reply)


def thanks_or_goodbye(rng: Random) -> Dialogue:
    if rng.random() < 0.5:
        return turn(pick(rng, "thanks"), pick(rng, "welcome"))
    return turn(pick(rng, "bye"), pick(rng, "farewell"))


def joke(rng: Random) -> Dialogue:
    return turn(pick(rng, "joke"), pick(rng, "jokes"))


def advice(rng: Random) -> Dialogue:
    reply, asks = rng.choice(list(TEXTS["advice"].items()))
    return turn(rng.choice(asks), reply)


def opinion(rng: Random) -> Dialogue:
    subject = topic(rng)
    return turn(pick(rng, "opinion", t=subject), pick(rng, "opinion_reply", t=subject))


def told_earlier(rng: Random) -> Dialogue:
    """Tell one to three facts, with small talk in between, and ask for one of them."""
    chosen = rng.sample(TEXTS["remember"], rng.randint(1, 3))
    told = [(one, rng.choice(words_of(one[4]))) for one in chosen]
    messages: list[Message] = []
    for (say, _, comment, _, _), value in told:
        messages.extend(turn(say.format(v=value), comment.format(v=value)).messages)
        if rng.random() < 0.3:
            messages.extend(greeting(rng).messages if rng.random() < 0.3 else advice(rng).messages)
    (_, ask, _, reply, _), value = rng.choice(told)
    messages.extend(turn(ask, reply.format(v=value)).messages)
    return Dialogue(tuple(messages))
