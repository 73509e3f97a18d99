"""Stories, poems and letters put together from parts."""

from __future__ import annotations

from random import Random

from .base import Dialogue, generator, turn
from .lexicon import (
    ADJECTIVES,
    ANIMALS,
    FIRST_NAMES,
    PLACES,
    THINGS,
    TIMES,
    article,
    capitalised,
    paragraph,
    topic,
)

_OPENINGS = (
    "Once upon a time there was {aa} named {n}.",
    "Long ago, {aa} named {n} lived {p}.",
    "{n} was {aa} who lived {p}.",
    "There once was {aa} whose name was {n}.",
    "In a faraway land lived {aa} called {n}.",
)
_WISHES = (
    "Every day {n} dreamed of finding {t}.",
    "{n} had always wanted {t}.",
    "More than anything, {n} wished for {t}.",
    "One day {n} heard about {t} that was hidden {p}.",
    "One morning {n} woke up and saw that {t} was gone.",
)
_JOURNEYS = (
    "So {n} packed a small bag and set out on a long journey.",
    "Without a word, {n} left home and walked for three days.",
    "{n} asked everyone for help, but nobody knew what to do.",
    "The road was long and the night was dark, but {n} did not give up.",
    "Soon the rain began to fall, and {n} had to look for a dry place.",
)
_MEETINGS = (
    "On the way {n} met {ff} named {m}.",
    "Then {ff} named {m} came along and offered to help.",
    "Suddenly {n} heard a voice. It was {m}, {ff}.",
    "{p}, {n} found {m}, {ff} who had lost the way.",
)
_TALK = (
    '"Do not be afraid," said {m}. "We can do it together."',
    '"What are you looking for?" asked {m}. "Something that I have lost," said {n}.',
    '"I know where to look," said {m}, "but you must be brave."',
    '"Thank you for stopping," said {m}. "Nobody else did."',
)
_TURNS = (
    "Together they looked everywhere until they found what they were looking for.",
    "They crossed a river, climbed a hill and found a secret door.",
    "At last they saw a light {p}, and there it was.",
    "They worked all night, and in the morning the problem was solved.",
)
_ENDINGS = (
    "From that day on, {n} and {m} were the best of friends.",
    "{n} went home with a happy heart and never forgot {m}.",
    "And they lived happily ever after.",
    "{n} had learned that a good friend is worth more than gold.",
    "That night they all sat by the fire and laughed. The end.",
)
_ASK_STORY = (
    "Tell me a story.",
    "Write a short story.",
    "Tell me a story about {s}.",
    "Write a short story about {s}.",
    "Can you tell me a story about {s}?",
    "I would like to hear a story about {s}.",
    "Please write a story about {s}.",
    "Write a story with {s} in it.",
    "Once upon a time, there was {s}. Continue the story.",
    "Tell me a long story about {s}.",
    "Make up a bedtime story about {s}.",
)


def tale(rng: Random, hero: str, name: str, friend: str) -> str:
    """Seven sentences about `hero`, an animal with or without an adjective, called `name`, who meets `friend`."""
    acts = (_OPENINGS, _WISHES, _JOURNEYS, _MEETINGS, _TALK, _TURNS, _ENDINGS)
    slots = {
        "n": name,
        "m": friend,
        "aa": article(hero),
        "ff": article(f"{rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"),
        "t": article(f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"),
    }
    sentences = [capitalised(rng.choice(act).format(p=rng.choice(PLACES), **slots)) for act in acts]
    return " ".join(sentences[:3]) + rng.choice((" ", "\n\n")) + " ".join(sentences[3:])


@generator("stories", 4.0)
def story(rng: Random) -> Dialogue:
    animal = rng.choice(ANIMALS)
    hero = f"{rng.choice(ADJECTIVES)} {animal}"
    name, friend = rng.sample(FIRST_NAMES, 2)
    if rng.random() < 0.2:
        ask = rng.choice(("Tell me a story about {n} the {a}.", "Write a short story about a {a} named {n}."))
        return turn(ask.format(n=name, a=animal), tale(rng, hero, name, friend))
    asked = article(hero) if rng.random() < 0.5 else article(animal)
    return turn(rng.choice(_ASK_STORY).format(s=asked), tale(rng, hero, name, friend))


_RHYMES = (
    (
        ("The sun goes down behind the {t},", "The wind is moving through the {t},"),
        (
            "and all the world is still and free.",
            "and sings a quiet song to me.",
            "as far as any eye can see.",
        ),
    ),
    (
        ("I walk along the road at night,", "The {t} is resting in the light,"),
        (
            "the stars above are clear and bright.",
            "and everything will be all right.",
            "a little lamp, a gentle sight.",
        ),
    ),
    (
        ("The {a} looks up to the sky,", "I do not ask the reason why,"),
        (
            "and watches all the clouds go by.",
            "the days are long, the birds fly high.",
            "the summer whispers a goodbye.",
        ),
    ),
    (
        ("The morning comes, the day is new,", "The {t} is covered in the dew,"),
        (
            "the sea is wide, the sky is blue.",
            "and I am thinking, friend, of you.",
            "and all the things we meant to do.",
        ),
    ),
    (
        ("The {a} is sleeping in the hay,", "The children laugh and run and play,"),
        ("and winter seems so far away.", "we dance until the end of day.", "and no one has a word to say."),
    ),
    (
        ("A {a} sits beside the door,", "The waves are rolling to the shore,"),
        (
            "and nobody could wish for more.",
            "as they have always done before.",
            "and sings the song it sang before.",
        ),
    ),
    (
        ("The rain is falling on the ground,", "The {t} has never made a sound,"),
        (
            "the leaves are turning all around.",
            "and what was lost again is found.",
            "and gently turns the world around.",
        ),
    ),
)


@generator("stories", 4.0)
def poem(rng: Random) -> Dialogue:
    subject = rng.choice((topic(rng), article(rng.choice(ANIMALS)), f"the {rng.choice(THINGS)}"))
    ask = rng.choice(
        (
            "Write a short poem.",
            "Write a poem.",
            "Write a short poem about {s}.",
            "Write a poem about {s}.",
            "Can you write a poem about {s}?",
            "Please write me a short poem about {s}.",
            "I need a poem about {s}.",
            "Compose a poem on {s}.",
            "Give me four lines about {s}.",
        )
    )
    lines: list[str] = []
    for first, second in rng.sample(_RHYMES, rng.choice((2, 2, 2, 3, 4))):
        lines += [rng.choice(first), rng.choice(second)]
    text = "\n".join(capitalised(line.format(t=rng.choice(THINGS), a=rng.choice(ANIMALS))) for line in lines)
    if "{s}" in ask and rng.random() < 0.6:
        text = f"A poem about {subject}:\n\n{text}"
    return turn(ask.format(s=subject), text)


_REASONS = (
    "I would like to ask you about {t}",
    "I am writing to you about {t}",
    "I want to thank you for your help with {t}",
    "I would like to invite you to an evening about {t}",
    "I am sorry that I missed our talk about {t}",
)


@generator("stories", 1.5)
def letter(rng: Random) -> Dialogue:
    to, sender = rng.sample(FIRST_NAMES, 2)
    subject = topic(rng)
    kind = rng.choice(("an email", "a letter", "a short email", "a message", "a short note"))
    ask = rng.choice(
        (
            "Write {k} to {to} about {s}.",
            "Please write {k} to {to} about {s} from {f}.",
            "Draft {k} about {s} for {to}. My name is {f}.",
        )
    )
    signed = sender if "{f}" in ask else "Your friend"
    body = rng.choice(_REASONS).format(t=subject)
    close = rng.choice(
        ("Please let me know when you have time.", "I hope to hear from you soon.", "Have a nice week.")
    )
    return turn(
        ask.format(k=kind, to=to, s=subject, f=sender),
        f"Dear {to},\n\n{body}. {close}\n\nBest wishes,\n{signed}",
    )


@generator("stories", 1.5)
def sentences_about(rng: Random) -> Dialogue:
    if rng.random() < 0.5:
        word = rng.choice(THINGS)
        text = f"The {rng.choice(ADJECTIVES)} {word} stood {rng.choice(PLACES)} {rng.choice(TIMES)}."
        return turn(
            rng.choice(("Write a sentence with the word {w}.", "Use {w} in a sentence.")).format(w=word),
            text,
            word,
        )
    return turn(
        rng.choice(
            ("Write a few sentences.", "Write a short paragraph.", "Say something.", "Write some text.")
        ),
        paragraph(rng, 3, 6),
    )
