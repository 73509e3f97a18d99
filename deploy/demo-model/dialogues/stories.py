"""Stories, poems and letters put together from parts."""

from __future__ import annotations

from random import Random

from .base import TEXTS, Dialogue, pick, turn
from .words import ADJECTIVES, ANIMALS, FIRST_NAMES, THINGS, article, capitalised, paragraph, topic

_ACTS = ("openings", "wishes", "journeys", "meetings", "talk", "turns", "endings")


def _tale(rng: Random, hero: str, name: str, friend: str) -> str:
    """Make seven sentences about `hero`, an animal called `name`, who meets `friend`."""
    slots = {
        "n": name,
        "m": friend,
        "aa": article(hero),
        "ff": article(f"{rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"),
        "t": article(f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"),
    }
    drawn = [rng.choice(TEXTS[act]).format(p=pick(rng, "places"), **slots) for act in _ACTS]
    sentences = [capitalised(one) for one in drawn]
    return " ".join(sentences[:3]) + rng.choice((" ", "\n\n")) + " ".join(sentences[3:])


def story(rng: Random) -> Dialogue:
    animal = rng.choice(ANIMALS)
    hero = f"{rng.choice(ADJECTIVES)} {animal}"
    name, friend = rng.sample(FIRST_NAMES, 2)
    if rng.random() < 0.2:
        return turn(pick(rng, "story_of", n=name, a=animal), _tale(rng, hero, name, friend))
    asked = article(hero) if rng.random() < 0.5 else article(animal)
    return turn(pick(rng, "story", s=asked), _tale(rng, hero, name, friend))


def chapters(rng: Random) -> Dialogue:
    """Tell two to four chapters about the same hero and friend."""
    hero = rng.choice(ANIMALS)
    name, friend = rng.sample(FIRST_NAMES, 2)
    count = rng.randint(2, 4)
    ask = pick(rng, "chapters", h=article(hero), n=count)
    told = [f"Chapter {i}\n\n{_tale(rng, hero, name, friend)}" for i in range(1, count + 1)]
    return turn(ask, "\n\n".join(told))


def poem(rng: Random) -> Dialogue:
    subject = rng.choice((topic(rng), article(rng.choice(ANIMALS)), f"the {rng.choice(THINGS)}"))
    ask = rng.choice(TEXTS["poem"])
    lines: list[str] = []
    for first, second in rng.sample(TEXTS["rhymes"], rng.choice((2, 2, 2, 3, 4))):
        lines += [rng.choice(first), rng.choice(second)]
    text = "\n".join(capitalised(line.format(t=rng.choice(THINGS), a=rng.choice(ANIMALS))) for line in lines)
    if "{s}" in ask and rng.random() < 0.6:
        text = f"A poem about {subject}:\n\n{text}"
    return turn(ask.format(s=subject), text)


def letter(rng: Random) -> Dialogue:
    to, sender = rng.sample(FIRST_NAMES, 2)
    subject = topic(rng)
    kind, ask = pick(rng, "letter_kinds"), rng.choice(TEXTS["letter"])
    signed = sender if "{f}" in ask else "Your friend"
    body, close = pick(rng, "reasons", t=subject), pick(rng, "letter_ends")
    return turn(
        ask.format(k=kind, to=to, s=subject, f=sender),
        f"Dear {to},\n\n{body}. {close}\n\nBest wishes,\n{signed}",
    )


def sentences_about(rng: Random) -> Dialogue:
    if rng.random() < 0.5:
        word = rng.choice(THINGS)
        text = f"The {rng.choice(ADJECTIVES)} {word} stood {pick(rng, 'places')} {pick(rng, 'times')}."
        return turn(pick(rng, "sentence_with", w=word), text)
    return turn(pick(rng, "sentences_about"), paragraph(rng, 3, 6))
