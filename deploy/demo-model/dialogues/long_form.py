"""Longer texts: stories in chapters, edits of whole files, questions about passages, long instructions."""

from __future__ import annotations

import json
from random import Random

from .base import Dialogue, Message, generator, turn
from .copying import some_text
from .facts import capital, definition, trivia
from .lexicon import (
    ANIMALS,
    CITIES,
    COLOURS,
    FIRST_NAMES,
    JOBS,
    THINGS,
    WEEKDAYS,
    article,
    full_name,
    paragraph,
)
from .python_code import a_function, fenced, new_name
from .smalltalk import greeting
from .stories import tale


@generator("stories", 0.7)
def chapters(rng: Random) -> Dialogue:
    """Tell of the same hero and friend through two to four chapters."""
    hero = rng.choice(ANIMALS)
    name, friend = rng.sample(FIRST_NAMES, 2)
    count = rng.randint(2, 4)
    ask = rng.choice(
        (
            "Tell me a long story about {h}.",
            "Write a long story about {h}.",
            "Write a story in {n} chapters about {h}.",
            "I want a story about {h} with {n} chapters.",
            "Write a story about {h}, {n} chapters, as long as you can.",
        )
    )
    told = [f"Chapter {i}\n\n{tale(rng, hero, name, friend)}" for i in range(1, count + 1)]
    return turn(ask.format(h=article(hero), n=count), "\n\n".join(told))


@generator("copying", 1.0)
def repeat_long(rng: Random) -> Dialogue:
    parts = [paragraph(rng, 2, 6) for _ in range(rng.randint(2, 4))]
    text = "\n\n".join(parts)
    ask = rng.choice(
        (
            "Repeat the following text word for word:\n\n{t}",
            "Copy this text exactly:\n\n{t}",
            "Please print this letter again without changes.\n\n{t}",
            "{t}\n\nRepeat the text above.",
        )
    )
    return turn(ask.format(t=text), text, text)


@generator("edits", 1.5)
def edit_file(rng: Random) -> Dialogue:
    """One function of a file of several is renamed, or taken out; the rest stays."""
    names, functions = [], []
    for _ in range(rng.randint(2, 5)):
        _, name, code = a_function(rng)
        if name not in names:
            names.append(name)
            functions.append(code)
    before = "\n\n\n".join(functions)
    index = rng.randrange(len(names))
    if len(names) > 1 and rng.random() < 0.3:
        ask = rng.choice(("Remove the function {o} from this file:\n{c}", "{c}\nDelete {o}."))
        after = "\n\n\n".join(f for i, f in enumerate(functions) if i != index)
        return turn(ask.format(o=names[index], c=fenced(before)), fenced(after), after)
    fresh = new_name(rng)
    after = before.replace(f"def {names[index]}(", f"def {fresh}(")
    ask = rng.choice(
        (
            "Rename {o} to {n} in this file and print the whole file:\n{c}",
            "{c}\nRename the function {o} to {n}.",
            "Here is my module:\n{c}\nPlease call the function {o} {n} instead.",
        )
    )
    return turn(ask.format(o=names[index], n=fresh, c=fenced(before)), fenced(after), after)


_NOTES = (
    ("{n} lives in {v}.", "Where does {n} live?", "{n} lives in {v}.", CITIES),
    ("{n} works as {v}.", "What is the job of {n}?", "{n} works as {v}.", tuple(article(j) for j in JOBS)),
    ("{n} comes on {v}.", "When does {n} come?", "{n} comes on {v}.", WEEKDAYS),
    ("{n} has a {v}.", "What does {n} have?", "{n} has a {v}.", THINGS + ANIMALS),
    ("{n} likes the color {v}.", "Which color does {n} like?", "{n} likes the color {v}.", COLOURS),
)


@generator("passages", 4.0)
def look_up(rng: Random) -> Dialogue:
    """Ask about one of several people after a passage of unrelated notes about all."""
    names = rng.sample(FIRST_NAMES, rng.randint(2, 12))
    notes = [(rng.choice(_NOTES), name) for name in names]
    told = [(note, name, rng.choice(note[3])) for note, name in notes]
    passage = " ".join(note[0].format(n=name, v=value) for note, name, value in told)
    note, name, value = rng.choice(told)
    ask = rng.choice(
        (
            "Read this text and answer the question.\n\nText: {p}\n\nQuestion: {q}",
            "{p}\n\n{q}",
            "Here are some notes: {p}\n{q}",
            "Context:\n{p}\n\nQuestion: {q}",
        )
    )
    reply = note[2].format(n=name, v=value)
    return turn(ask.format(p=passage, q=note[1].format(n=name)), reply, reply)


@generator("passages", 1.5)
def records(rng: Random) -> Dialogue:
    """Ask about one field of a JSON list of records."""
    rows = [
        {"id": rng.randint(100, 999), "name": full_name(rng), "city": rng.choice(CITIES)}
        for _ in range(rng.randint(2, 8))
    ]
    row = rng.choice(rows)
    field = rng.choice(("id", "city"))
    table = "[\n" + ",\n".join(f"  {json.dumps(r)}" for r in rows) + "\n]"
    ask = rng.choice(("{t}\n\nWhat is the {f} of {n}?", "Here is some data:\n{t}\nGive me the {f} of {n}."))
    reply = f"The {field} of {row['name']} is {row[field]}."
    return turn(ask.format(t=table, f=field, n=row["name"]), reply, reply)


_RULES = (
    "Be polite.",
    "Keep your answers short.",
    "Use plain words.",
    "Never make up facts.",
    "If you do not know the answer, say so.",
    "Write code in Python.",
    "Do not talk about prices.",
    "Greet the user in a friendly way.",
    "Answer in English.",
    "Use JSON when the user asks for data.",
    "Take the time to read the question.",
    "Do not repeat the question.",
)


@generator("passages", 1.5)
def long_instructions(rng: Random) -> Dialogue:
    """Put a system prompt with a role and a list of rules before an ordinary question."""
    place = rng.choice(
        ("a bookshop", "a library", "a museum", "a school", "a bakery", "a hotel", "a bank", "a garage")
    )
    rules = "\n".join(f"- {rule}" for rule in rng.sample(_RULES, rng.randint(3, len(_RULES))))
    prompt = rng.choice(
        (
            f"You are the assistant of {place} in {rng.choice(CITIES)}.\n\nFollow these rules:\n{rules}",
            f"You work for {place}. Your rules are:\n{rules}\n\nNotes: {paragraph(rng, 1, 5)}",
        )
    )
    plain = rng.choice((capital, definition, trivia, greeting))(rng)
    return Dialogue((Message("system", prompt), *plain.messages), answer=plain.answer)


@generator("copying", 0.7)
def repeat_earlier(rng: Random) -> Dialogue:
    """Ask again for a text of two turns ago."""
    text, other = some_text(rng), trivia(rng)
    messages = (
        Message("user", f"Repeat after me: {text}"),
        Message("assistant", text),
        *other.messages,
        Message("user", rng.choice(("Repeat the first text again.", "What did I ask you to repeat?"))),
        Message("assistant", text),
    )
    return Dialogue(messages, answer=text)
