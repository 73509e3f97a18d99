"""Fields of a sentence as JSON or alone, and questions about passages."""

from __future__ import annotations

import json
from random import Random

from .base import TEXTS, Dialogue, Message, pick, turn
from .facts import capital, definition, trivia
from .smalltalk import greeting
from .words import (
    CITIES,
    COLOURS,
    COUNTABLE,
    FIRST_NAMES,
    JOBS,
    THINGS,
    full_name,
    made_up_word,
    paragraph,
    words_of,
)

Record = dict[str, str | int]


def _person(rng: Random) -> tuple[str, Record]:
    record: Record = {"name": full_name(rng), "age": rng.randint(18, 80), "city": rng.choice(CITIES)}
    if rng.random() < 0.4:
        return "person_with_job", record | {"job": rng.choice(JOBS)}
    return "person", record


def _order(rng: Random) -> tuple[str, Record]:
    item, quantity = rng.choice(COUNTABLE), rng.randint(1, 99)
    return "record_order", {"item": item, "quantity": quantity, "customer": full_name(rng)}


def _meeting(rng: Random) -> tuple[str, Record]:
    day, time = pick(rng, "weekdays"), f"{rng.randint(8, 18)}:{rng.choice(('00', '15', '30', '45'))}"
    return "meeting", {"day": day, "time": time, "place": rng.choice(CITIES)}


def _product(rng: Random) -> tuple[str, Record]:
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    return "product", {"product": thing, "color": colour, "price": rng.randint(1, 500)}


def _contact(rng: Random) -> tuple[str, Record]:
    name = full_name(rng)
    email = f"{name.split()[0].lower()}@{made_up_word(rng)}.{rng.choice(('com', 'org', 'net'))}"
    return "contact", {"name": name, "email": email}


def _date(rng: Random) -> tuple[str, Record]:
    month, day = pick(rng, "months"), rng.randint(1, 28)
    return "record_date", {"month": month, "day": day, "year": rng.randint(1900, 2040)}


_RECORDS = (_person, _person, _order, _meeting, _product, _contact, _date)


def _record(rng: Random) -> tuple[str, Record]:
    """Draw a record and a sentence with its fields."""
    key, record = rng.choice(_RECORDS)(rng)
    return pick(rng, key, **record), record


def to_json(rng: Random) -> Dialogue:
    text, record = _record(rng)
    fields = list(record)
    if len(fields) > 2 and rng.random() < 0.3:
        fields.remove(rng.choice(fields))
    if rng.random() < 0.2:
        rng.shuffle(fields)
    named = ", ".join(fields[:-1]) + " and " + fields[-1]
    return turn(pick(rng, "to_json", f=named, t=text), json.dumps({f: record[f] for f in fields}))


def one_field(rng: Random) -> Dialogue:
    text, record = _record(rng)
    field = rng.choice(tuple(record))
    value = str(record[field])
    return turn(pick(rng, "one_field", f=field, t=text), f"The {field} is {value}.")


def json_field(rng: Random) -> Dialogue:
    _, record = _record(rng)
    field = rng.choice(tuple(record))
    value = str(record[field])
    ask = pick(rng, "json_field", f=field, j=json.dumps(record))
    return turn(ask, f"The value of {field} is {value}.")


def sentiment(rng: Random) -> Dialogue:
    mood = rng.choice(tuple(TEXTS["reviews"]))
    text = rng.choice(TEXTS["reviews"][mood]).format(t=rng.choice(THINGS))
    return turn(pick(rng, "sentiment", t=text), mood)


def look_up(rng: Random) -> Dialogue:
    """Ask about one of several people in a passage of unrelated notes."""
    names = rng.sample(FIRST_NAMES, rng.randint(2, 12))
    notes = [(rng.choice(TEXTS["notes"]), name) for name in names]
    told = [(note, name, rng.choice(words_of(note[3]))) for note, name in notes]
    passage = " ".join(note[0].format(n=name, v=value) for note, name, value in told)
    (_, question, reply, _), name, value = rng.choice(told)
    return turn(pick(rng, "look_up", p=passage, q=question.format(n=name)), reply.format(n=name, v=value))


def records(rng: Random) -> Dialogue:
    """Ask about one field of a JSON list of records."""
    rows = [
        {"id": rng.randint(100, 999), "name": full_name(rng), "city": rng.choice(CITIES)}
        for _ in range(rng.randint(2, 8))
    ]
    row = rng.choice(rows)
    field = rng.choice(("id", "city"))
    table = "[\n" + ",\n".join(f"  {json.dumps(r)}" for r in rows) + "\n]"
    ask = pick(rng, "records", t=table, f=field, n=row["name"])
    return turn(ask, f"The {field} of {row['name']} is {row[field]}.")


def long_instructions(rng: Random) -> Dialogue:
    """Put a system prompt with a role and a list of rules before an ordinary question."""
    place, every = pick(rng, "work_places"), TEXTS["rules"]
    rules = "\n".join(f"- {rule}" for rule in rng.sample(every, rng.randint(3, len(every))))
    prompt = rng.choice(
        (
            f"You are the assistant of {place} in {rng.choice(CITIES)}.\n\nFollow these rules:\n{rules}",
            f"You work for {place}. Your rules are:\n{rules}\n\nNotes: {paragraph(rng, 1, 5)}",
        )
    )
    plain = rng.choice((capital, definition, trivia, greeting))(rng)
    return Dialogue((Message("system", prompt), *plain.messages))
