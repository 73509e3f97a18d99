"""The requirements of one attempt at a request.

To add a field, see docs/extending.md. If a filter uses it, `could_take` in scheduler/placer.py must know it;
otherwise a waiting request blocks slots that it cannot use.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

from baton.attempts import Attempt
from baton.prefix_keys import NO_KEYS, PromptKeys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.prefixes.prefix_ledger import Match


class Adapter(NamedTuple):
    """A LoRA adapter. The fingerprint distinguishes files under the same name."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Need:
    """The requirements of one attempt. Raises ValueError for invalid values."""

    attempt: Attempt
    router_id: str
    prompt_tokens: int  # tokens to prefill: the prompt, and on a later attempt the output so far
    max_new_tokens: int  # upper bound on the tokens still to be generated
    prefix: PromptKeys = NO_KEYS  # keys of the prompt's KV blocks
    exclude: frozenset[str] = frozenset()  # ids of workers that failed an earlier attempt
    vllm_version: str = ""  # the version that the router runs; empty: any
    model_fingerprint: str = ""  # the weights that generated the first tokens; empty: any
    waited_s: float = 0.0  # since the request arrived; when all workers are full, the oldest goes first
    adapter: Adapter | None = None  # None: the base model
    priority: int = 0  # its class's; if all workers are full, lower values go before older requests
    room: float = 1.0  # share of each limit that may be in use with this request
    encode: bool = False  # compute an image's embeddings; `prompt_tokens` is its size, `prefix` its one key
    match: Match | None = None  # set by the scheduler: the part of the prompt on each worker; None: unknown

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"request {self.attempt.request_id!r} has no prompt tokens")
        if self.max_new_tokens < 0:
            raise ValueError(f"request {self.attempt.request_id!r}: max_new_tokens is {self.max_new_tokens}")
        if not 0 < self.room <= 1:
            raise ValueError(f"request {self.attempt.request_id!r}: room is {self.room}, not above 0 up to 1")

    def tokens_for(self, worker_id: str) -> int:
        """Return how many of the prompt's tokens a worker probably has to compute; at least 1."""
        return self.prompt_tokens - (self.match.tokens(worker_id) if self.match else 0)


# Fields with the same name and form in the message.
_SAME = tuple(
    one.name
    for one in fields(Need)
    if one.name not in ("attempt", "prefix", "exclude", "adapter", "room", "match")
)
_same = attrgetter(*_SAME)


def need_to_wire(need: Need) -> pb.Need:
    return pb.Need(
        request_id=need.attempt.request_id,
        epoch=need.attempt.epoch,
        prefix_keys=need.prefix.keys,
        key_tokens=need.prefix.tokens,
        exclude=need.exclude,
        adapter=pb.Adapter(**need.adapter._asdict()) if need.adapter else None,
        room=need.room,
        **dict(zip(_SAME, _same(need), strict=True)),
    )


def need_from_wire(message: pb.Need) -> Need:
    """Convert a message. Raises ValueError for an invalid one."""
    adapter = message.adapter if message.HasField("adapter") else None
    return Need(
        attempt=Attempt(message.request_id, message.epoch),
        prefix=PromptKeys(tuple(message.prefix_keys), message.key_tokens),
        exclude=frozenset(message.exclude),
        adapter=Adapter(adapter.name, adapter.fingerprint) if adapter else None,
        room=message.room or 1.0,
        **dict(zip(_SAME, _same(message), strict=True)),
    )
