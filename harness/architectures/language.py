"""The language of the tiny models: which token follows which, and texts in it.

A trained draft model agrees with its target often but not always; random weights never agree. So all models
share a table in which each of the 95 printable characters has a successor. Their embeddings are orthogonal,
and the output head favours the successor of the character that is closest to the hidden state. The layers add
random values that depend on all earlier tokens; their size decides how often the model departs from the
table. A drafter that knows the table is right as often as its target follows it.
"""

from __future__ import annotations

import random

import torch

VOCABULARY = 320
CHARACTERS = range(32, 127)  # tokens of printable ASCII
HIDDEN = 128
SHARPNESS = 30.0  # logit of a token if the hidden state is its predecessor's embedding


def successors() -> dict[int, int]:
    """Map each character to its successor. The successors form one cycle."""
    cycle = list(CHARACTERS)
    random.Random(0).shuffle(cycle)
    return {token: cycle[(place + 1) % len(cycle)] for place, token in enumerate(cycle)}


def embedding(hidden: int = HIDDEN) -> torch.Tensor:
    """Return [VOCABULARY, hidden]: rows of length sqrt(hidden), orthogonal for characters."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(VOCABULARY, hidden, generator=generator)
    characters = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q[: len(CHARACTERS)]
    rows = torch.nn.functional.normalize(rows)
    rows[CHARACTERS.start : CHARACTERS.stop] = characters
    return rows * hidden**0.5


def head(hidden: int = HIDDEN, steps: int = 1) -> torch.Tensor:
    """Return the output head's weights [VOCABULARY, hidden].

    A hidden state near a character's embedding gives the highest logit to the character `steps` positions
    later.

    All other tokens get a logit of 0, so they are never the most likely, and hardly ever sampled.
    """
    rows, embedded, follows = torch.zeros(VOCABULARY, hidden), embedding(hidden), successors()
    for token in CHARACTERS:
        following = token
        for _ in range(steps):
            following = follows[following]
        rows[following] = embedded[token] * SHARPNESS / hidden
    return rows


def prompt(number: int, length: int = 40) -> list[int]:
    """Return the token ids of a text; half of its tokens follow the table."""
    follows, chance = successors(), random.Random(number)
    text = [chance.choice(CHARACTERS)]
    for _ in range(chance.randint(length // 2, 3 * length // 2) - 1):
        text.append(follows[text[-1]] if chance.random() < 0.5 else chance.choice(CHARACTERS))
    return text


def prompts(count: int) -> list[list[int]]:
    """Return the first `count` texts, of 20 to 60 tokens each."""
    return [prompt(number) for number in range(count)]
