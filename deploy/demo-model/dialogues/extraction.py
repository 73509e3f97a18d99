"""Facts of a sentence as JSON, or one of them alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from .base import Dialogue, generator, turn
from .lexicon import CITIES, COLOURS, COUNTABLE, JOBS, MONTHS, THINGS, WEEKDAYS, full_name, made_up_word

Record = dict[str, str | int]


def _person(rng: Random) -> tuple[str, Record]:
    record: Record = {"name": full_name(rng), "age": rng.randint(18, 80), "city": rng.choice(CITIES)}
    if rng.random() < 0.4:
        record["job"] = rng.choice(JOBS)
        text = rng.choice(
            (
                "{name} is a {age} year old {job} from {city}.",
                "The {job} {name} is {age} and lives in {city}.",
            )
        )
    else:
        text = rng.choice(
            (
                "{name} is {age} years old and lives in {city}.",
                "{name}, {age}, comes from {city}.",
                "My friend {name} from {city} is {age} years old.",
            )
        )
    return text.format(**record), record


def _order(rng: Random) -> tuple[str, Record]:
    record: Record = {
        "item": rng.choice(COUNTABLE),
        "quantity": rng.randint(1, 99),
        "customer": full_name(rng),
    }
    text = rng.choice(
        (
            "{customer} ordered {quantity} {item}.",
            "Please send {quantity} {item} to {customer}.",
            "Order of {quantity} {item} for {customer}.",
        )
    )
    return text.format(**record), record


def _meeting(rng: Random) -> tuple[str, Record]:
    record: Record = {
        "day": rng.choice(WEEKDAYS),
        "time": f"{rng.randint(8, 18)}:{rng.choice(('00', '15', '30', '45'))}",
        "place": rng.choice(CITIES),
    }
    text = rng.choice(
        (
            "The meeting is on {day} at {time} in {place}.",
            "We meet in {place} on {day} at {time}.",
            "See you on {day}, {time}, in {place}.",
        )
    )
    return text.format(**record), record


def _product(rng: Random) -> tuple[str, Record]:
    record: Record = {
        "product": rng.choice(THINGS),
        "color": rng.choice(COLOURS),
        "price": rng.randint(1, 500),
    }
    text = rng.choice(
        (
            "The {color} {product} costs {price} dollars.",
            "We sell a {color} {product} for {price} dollars.",
            "A {product} in {color} is {price} dollars.",
        )
    )
    return text.format(**record), record


def _contact(rng: Random) -> tuple[str, Record]:
    name = full_name(rng)
    record: Record = {
        "name": name,
        "email": f"{name.split()[0].lower()}@{made_up_word(rng)}.{rng.choice(('com', 'org', 'net'))}",
    }
    text = rng.choice(
        ("You can reach {name} at {email}.", "Write to {name} ({email}).", "{name} has the address {email}.")
    )
    return text.format(**record), record


def _date(rng: Random) -> tuple[str, Record]:
    record: Record = {"month": rng.choice(MONTHS), "day": rng.randint(1, 28), "year": rng.randint(1900, 2040)}
    text = rng.choice(
        (
            "The letter was sent on {month} {day}, {year}.",
            "It happened on {day} {month} {year}.",
            "The date is {month} {day}, {year}.",
        )
    )
    return text.format(**record), record


_RECORDS: tuple[Callable[[Random], tuple[str, Record]], ...] = (
    _person,
    _person,
    _order,
    _meeting,
    _product,
    _contact,
    _date,
)


@generator("extraction", 5.0)
def to_json(rng: Random) -> Dialogue:
    text, record = rng.choice(_RECORDS)(rng)
    fields = list(record)
    if len(fields) > 2 and rng.random() < 0.3:
        fields.remove(rng.choice(fields))
    if rng.random() < 0.2:
        rng.shuffle(fields)
    result = json.dumps({f: record[f] for f in fields})
    named = ", ".join(fields[:-1]) + " and " + fields[-1]
    ask = rng.choice(
        (
            "Extract {f} as JSON: {t}",
            "Return {f} as a JSON object.\n{t}",
            "Read the text and give {f} in JSON.\nText: {t}",
            "{t}\nWrite {f} as JSON.",
            "Extract the {f} from this text and answer in JSON: {t}",
        )
    )
    return turn(ask.format(f=named, t=text), result, result)


@generator("extraction", 2.5)
def one_field(rng: Random) -> Dialogue:
    text, record = rng.choice(_RECORDS)(rng)
    field = rng.choice(tuple(record))
    value = str(record[field])
    ask = rng.choice(
        (
            "What is the {f} in this text? {t}",
            "Find the {f}: {t}",
            "{t}\nWhat is the {f}?",
            "Read this: {t} Tell me the {f}.",
        )
    )
    return turn(ask.format(f=field, t=text), f"The {field} is {value}.", value)


@generator("extraction", 1.0)
def json_field(rng: Random) -> Dialogue:
    _, record = rng.choice(_RECORDS)(rng)
    field = rng.choice(tuple(record))
    ask = rng.choice(
        ("What is the value of {f} in {j}?", "Read {f} from this JSON: {j}", "Given {j}, what is {f}?")
    )
    return turn(
        ask.format(f=field, j=json.dumps(record)),
        f"The value of {field} is {record[field]}.",
        str(record[field]),
    )


_REVIEWS = {
    "positive": (
        "I love this {t}.",
        "The {t} works very well.",
        "What a great {t}!",
        "I am very happy with the {t}.",
        "The {t} is the best I ever had.",
        "This {t} made my day.",
    ),
    "negative": (
        "I hate this {t}.",
        "The {t} broke after one day.",
        "What a terrible {t}!",
        "I am not happy with the {t}.",
        "The {t} is the worst I ever had.",
        "This {t} was a waste of money.",
    ),
}


@generator("extraction", 1.5)
def sentiment(rng: Random) -> Dialogue:
    mood = rng.choice(tuple(_REVIEWS))
    text = rng.choice(_REVIEWS[mood]).format(t=rng.choice(THINGS))
    ask = rng.choice(
        (
            "Is this review positive or negative? {t}",
            "Classify the sentiment as positive or negative: {t}",
            "Sentiment of this text: {t}",
            "Does the writer sound happy or not? Answer positive or negative. {t}",
        )
    )
    return turn(ask.format(t=text), mood, mood)
