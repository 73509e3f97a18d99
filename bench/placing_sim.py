"""A fleet on virtual time, on which requests are placed by the product's own policy, index and logs.

Simulated: requests (independent ones, or chats whose prompts grow from turn to turn and begin with one of a
few system prompts); prefill workers that compute first come first served what their prefix caches lack;
decode workers; caches that lose what was not used for longest; heartbeats that carry what changed. Not
simulated: the handoff, batches of decode, failures, schedulers other than one.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import claim
from baton.scheduler.policy import Policy, WorkerChoice
from baton.scheduler.prefixes.index import PrefixIndex
from baton.scheduler.prefixes.keys import key_of, prompt_keys
from baton.scheduler.prefixes.ledger import PrefixLedger
from baton.scheduler.prefixes.log import BlockLog, Change
from baton.scheduler.prefixes.match import Match
from baton.scheduler.types import Attempt, Booking, FleetView, Need, Reserved, WorkerRecord
from baton.services.config import PolicySettings, SchedulerSettings

BLOCK = 32  # tokens
SPEED = 8_000.0  # prompt tokens a second, of a prefill worker
GAP_S = 0.02  # between the tokens of an answer
HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class Shape:
    """A fleet of pairs, and what it is asked."""

    pairs: int
    cache_blocks: int  # of a worker
    load: float  # share of what the prefill workers could compute, had they no caches
    requests: int
    chats: bool  # else prompts have nothing in common
    prompt: int = 2_000  # mean tokens of an independent prompt
    systems: int = 8  # different system prompts
    system: int = 1_000  # tokens of each
    turn: int = 400  # mean tokens that a turn adds, with the answer before
    turns: int = 8  # mean of a chat
    think_s: float = 10.0
    answer: int = 100


@dataclass
class Ask:
    """One request: the hashes of its prompt's blocks, and of those that its answer adds."""

    at: float
    hashes: list[int]
    tokens: int
    chat: int


@dataclass
class Cache:
    """A worker's prefix cache: block hash -> its depth; the one that is lost next is the first."""

    most: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)
    log: BlockLog = field(default_factory=BlockLog)
    _stored: dict[int, int] = field(default_factory=dict)
    _removed: dict[int, int] = field(default_factory=dict)

    def hit(self, hashes: Sequence[int]) -> int:
        """Return how many blocks from the first on are there."""
        return next((at for at, one in enumerate(hashes) if one not in self.blocks), len(hashes))

    def use(self, hashes: Sequence[int]) -> None:
        """Hold these blocks, a chain's last ones as those that are lost first."""
        for depth in range(len(hashes), 0, -1):
            one = hashes[depth - 1]
            if one not in self.blocks:
                self._removed.pop(one, None)
                self._stored[one] = depth
            self.blocks[one] = depth
            self.blocks.move_to_end(one)
        while len(self.blocks) > self.most:
            one, depth = self.blocks.popitem(last=False)
            self._stored.pop(one, None)
            self._removed[one] = depth

    def tell(self) -> BlockLog:
        """Return the log with what changed since the last heartbeat."""
        self.log.take(
            Change(
                removed=[key_of(one, depth) for one, depth in self._removed.items()],
                stored=[key_of(one, depth) for one, depth in self._stored.items()],
            )
        )
        self._stored, self._removed = {}, {}
        return self.log


class Fleet:
    """Pairs of workers, placed on by one policy."""

    def __init__(self, shape: Shape, policy: PolicySettings, seed: int, *, events: bool) -> None:
        """Prepare it; without `events` the scheduler hears nothing of caches."""
        self._shape = shape
        self._events = events
        # Nothing is refused: what is measured is where requests go.
        self._limits = SchedulerSettings(
            max_queued_prompt_tokens=10**9, max_queue_factor=1_000, idle_decode_tokens=0
        )
        self._policy = Policy(self._limits, policy, random.Random(seed))
        self._draw = random.Random(seed)
        self._ledger = PrefixLedger(PrefixIndex(SchedulerSettings().prefix_blocks), lambda: self._now)
        self._now = 0.0
        self._records = {
            name: WorkerRecord(_identity(name, role), pb.WORKER_STATE_READY, None, Reserved(), False, 5.0)
            for number in range(shape.pairs)
            for name, role in ((f"p{number}", pb.ROLE_PREFILL), (f"d{number}", pb.ROLE_DECODE))
        }
        self._view = FleetView(self._records, 0, 0)
        self._caches = {name: Cache(shape.cache_blocks) for name in self._records}
        self._free_at = dict.fromkeys(self._records, 0.0)
        self.first_token_s: list[float] = []
        self.computed = 0
        self.prompts = 0

    def run(self) -> None:
        """Ask all requests."""
        roles = {name: one.role for name, one in self._records.items()}
        order = count()
        events: list[tuple[float, int, str, object]] = []

        def at(when: float, what: str, of: object) -> None:
            heapq.heappush(events, (when, next(order), what, of))

        asks = Asks(self._shape, self._draw)
        for name in self._records:
            at(self._draw.random() * HEARTBEAT_S, "heartbeat", name)
        for ask in asks.begin():
            at(ask.at, "ask", ask)
        while len(self.first_token_s) < self._shape.requests:
            self._now, _, what, of = heapq.heappop(events)
            if what == "heartbeat" and isinstance(of, str):
                at(self._now + HEARTBEAT_S, "heartbeat", of)
                if self._events:
                    self._beat(of)
                    self._ledger.keep(roles)
            elif what == "ask" and isinstance(of, Ask):
                booking, prefilled = self._place(of)
                at(prefilled, "prefilled", (booking, of))
                at(prefilled + GAP_S * self._shape.answer, "over", (booking, of))
                following = asks.after(of, prefilled + GAP_S * self._shape.answer)
                if following is not None:
                    at(following.at, "ask", following)
            elif isinstance(of, tuple):
                self._end(what, *of)

    def _beat(self, name: str) -> None:
        log = self._caches[name].tell()
        while True:
            log.heard(self._ledger.hear(name, log.message()))
            if not log.behind:
                return

    def _place(self, ask: Ask) -> tuple[Booking, float]:
        """Return the booking, and when the prompt is prefilled."""
        prompt = prompt_keys(ask.hashes, BLOCK)
        match = Match(self._ledger, prompt, ask.tokens) if self._events else None
        attempt = Attempt(f"r{self.prompts}", 1)
        need = Need(attempt, "router", ask.tokens, self._shape.answer, prefix=prompt, match=match)
        choice = self._policy.choose(self._view, need)
        if not isinstance(choice, WorkerChoice) or choice.prefill is None:
            raise SystemExit(f"no pair was chosen: {choice}")
        booking = claim(need, choice.prefill, choice.decode, self._limits).booking
        for worker_id in booking.worker_ids:
            self._records[worker_id].reserved.add(booking.share(worker_id))
        name = booking.prefill_id
        cache = self._caches[name]
        computed = ask.tokens - min(ask.tokens - 1, BLOCK * cache.hit(ask.hashes))
        cache.use(ask.hashes)
        self.prompts += ask.tokens
        self.computed += computed
        self._free_at[name] = max(self._now, self._free_at[name]) + computed / SPEED
        self.first_token_s.append(self._free_at[name] - self._now)
        return booking, self._free_at[name]

    def _end(self, what: str, booking: Booking, ask: Ask) -> None:
        for worker_id in booking.worker_ids:
            prefilled = booking.share(worker_id, prefilled=True)
            reserved = self._records[worker_id].reserved
            if what == "prefilled":
                reserved.take(booking.share(worker_id))
                if worker_id == booking.decode_id:
                    reserved.add(prefilled)
                    self._caches[worker_id].use(ask.hashes)
            elif worker_id == booking.decode_id:
                reserved.take(prefilled)


class Asks:
    """The requests of a run."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        self._shape = shape
        self._draw = draw
        self._systems = [
            [draw.getrandbits(64) for _ in range(shape.system // BLOCK)] for _ in range(shape.systems)
        ]

    def begin(self) -> Iterator[Ask]:
        """Yield the requests that follow on nothing: all of them, or the chats' first ones."""
        shape, now = self._shape, 0.0
        mean = shape.prompt
        if shape.chats:  # of a whole chat
            mean = sum(shape.system + turn * shape.turn for turn in range(1, shape.turns + 1))
        a_second = shape.load * shape.pairs * SPEED / mean
        for chat in range(shape.requests):
            now += self._draw.expovariate(a_second)
            tokens = shape.turn + shape.system if shape.chats else self._length(shape.prompt)
            hashes = list(self._draw.choice(self._systems)) if shape.chats else []
            yield Ask(now, self._longer(hashes, tokens), tokens, chat)

    def after(self, ask: Ask, over: float) -> Ask | None:
        """Return the next request of this one's chat, if there is one."""
        shape = self._shape
        if not shape.chats or self._draw.random() < 1 / shape.turns:
            return None
        tokens = ask.tokens + self._length(shape.turn)
        at = over + self._draw.expovariate(1 / shape.think_s)
        return Ask(at, self._longer(ask.hashes, tokens), tokens, ask.chat)

    def _longer(self, hashes: list[int], tokens: int) -> list[int]:
        return hashes + [self._draw.getrandbits(64) for _ in range(tokens // BLOCK - len(hashes))]

    def _length(self, mean: float) -> int:
        return max(1, int(self._draw.lognormvariate(0, 0.6) * mean / 1.197))  # the mean of the draw


def _identity(name: str, role: pb.Role) -> pb.WorkerIdentity:
    capacity = pb.Capacity(
        compatibility_hash="aa",
        block_size=BLOCK,
        num_blocks=10**9,
        max_num_seqs=10**4,
        max_model_len=10**6,
        lookahead_tokens=1,
        transports=["shm"],
    )
    return pb.WorkerIdentity(worker_id=name, role=role, address="127.0.0.1:1", model="m", capacity=capacity)
