"""A simulated engine with known costs and acceptance, so the best draft length is known."""

import functools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.services.decode.draft_length_choice import DraftStep

_WANDERS = 60  # correlation time of the machine's pace, in steps


@functools.cache
def _jump(seed, requests, limit):
    return random.Random(f"{seed} {requests} {limit}").uniform(-1.0, 1.0)


@dataclass
class World:
    """Costs in seconds; `acceptance` of each position, given that the one before was accepted."""

    acceptance: Sequence[float]
    fixed: float = 2e-3
    request: float = 2e-5
    token: float = 5e-5  # verified
    any_draft: float = 2e-4  # once if anything is verified, so the cost is not linear
    one_pass: float = 4e-4
    pass_request: float = 5e-6
    found: float = 1.0  # share of rows in which something is drafted at all
    noise: float = 0.05
    hiccups: float = 0.003  # share of steps that take 50 ms more
    compiles: float = 0.0  # seconds that the first step of each kind takes longer
    matching: bool = False  # no draft model
    slow: float = 1.0  # factor on all times
    jump: float = 0.0  # maximum by which a length's time differs from the sum of its costs
    drift: float = 0.0  # standard deviation of the machine's pace
    seed: int = 0
    limits: list[int] = field(default_factory=list)  # chosen so far

    def __post_init__(self):
        self._draw = random.Random(self.seed)
        self._before = (0, 0)  # requests, limit
        self._pace = 0.0
        self._compiled = set()  # numbers of drafted and of verified tokens

    def seconds(self, requests, tokens, limit, verified):
        passes = 0 if self.matching else limit
        return (
            self.slow
            * (1.0 + self.jump * _jump(self.seed, requests, limit))
            * (
                self.fixed
                + self.request * requests
                + self.token * tokens
                + self.any_draft * (verified > 0)
                + passes * (self.one_pass + self.pass_request * requests)
            )
        )

    def tokens(self, limit):
        """Return the expected tokens of a request per step, including the model's own."""
        tokens, chance = 1.0, self.found
        for share in self.acceptance[:limit]:
            chance *= share
            tokens += chance
        return tokens

    def rate(self, requests, limit):
        """Return the tokens per second of a fixed limit."""
        verified = requests * (1 + self.found * limit)
        return requests * self.tokens(limit) / self.seconds(requests, verified, limit, limit)

    def best(self, requests):
        return max(range(len(self.acceptance) + 1), key=lambda limit: self.rate(requests, limit))

    def run(self, chooser, requests, steps):
        for _ in range(steps):
            limit = chooser.choose(requests)
            had, asked = self._before
            drafted, accepted = [0] * chooser.limit, [0] * chooser.limit
            rows = min(requests, had)
            for _row in range(rows):
                if self._draw.random() >= self.found:
                    continue
                alive = True
                for position in range(asked):
                    drafted[position] += 1
                    alive = alive and self._draw.random() < self.acceptance[position]
                    accepted[position] += alive
            tokens = requests + sum(drafted)
            seconds = self.seconds(requests, tokens, limit, asked)
            self._pace += math.sqrt(2 / _WANDERS) * self._draw.gauss(0.0, self.drift) - self._pace / _WANDERS
            measured = seconds * math.exp(self._pace) * max(0.5, self._draw.gauss(1.0, self.noise))
            measured += 0.05 * (self._draw.random() < self.hiccups)
            measured += self.compiles * ((limit, asked) not in self._compiled)
            self._compiled.add((limit, asked))
            chooser.observe(DraftStep(requests, tokens, limit, measured, rows, asked, drafted, accepted))
            self._before = requests, limit
            self.limits.append(limit)

    def regret(self, chooser, requests, steps):
        """Return how much slower its choices are than the best fixed limit, in expectation."""
        begin = len(self.limits)
        self.run(chooser, requests, steps)
        chosen = Counter(self.limits[begin:])
        tokens = {limit: count * self.tokens(limit) for limit, count in chosen.items()}
        took = sum(tokens[limit] / self.rate(requests, limit) for limit in tokens)
        return 1.0 - sum(tokens.values()) / took / self.rate(requests, self.best(requests))
