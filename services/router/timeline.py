"""Divide a request's time into stages, which follow one another without gaps up to the first token.

    admit     until its tenant's limits admit it; after `render`, also the charge for its tokens
    receive   the body
    render    vLLM's front end: chat template, tokenizer
    wait      in the waiting room, until the call that places it begins
    place     that call; contains `schedule`, the scheduler's share
    fetch     until the source of the prompt's first blocks has saved them, or the engine starts without them
    encode    until encode workers have the embeddings of the prompt's images
    send      to the worker, until its engine has queued the request
    queue     in the engine, until its first step; contains `prefix`, the load of the first blocks
    prefill   until the engine emits the first token
    reply     from the engine to the router
    hold      in the router, until the decode worker has a slot
    deliver   vLLM's front end again, until the stream's first byte is in the client's socket
    lost      an attempt that failed before its first token
    other     several stages whose boundaries are not known

Later stages overlap with `deliver`: `handoff` and its parts, `decode.first`, `decode`, and `end`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from baton.protos import worker_pb2
from baton.services.router.state import RequestState
from baton.services.router.timings import ROUTER, Process, Timings

TO_FIRST_TOKEN = (
    "admit",
    "receive",
    "render",
    "wait",
    "place",
    "fetch",
    "encode",
    "send",
    "queue",
    "prefill",
    "reply",
    "hold",
    "deliver",
    "lost",
    "other",
)
_NONE: Mapping[str, Any] = {}
_HANDOFF = ("wait", "move", "check", "load")


class Stage(NamedTuple):
    """A part of a request's time; begin and end are the router's time.monotonic."""

    name: str
    begin: float
    end: float
    process: Process = ROUTER  # the process that spent the time
    attempt: int = 0  # 0: the request itself
    within: str = ""  # the containing stage of the same attempt
    attributes: Mapping[str, Any] = _NONE

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class _Chain:
    def __init__(self, begin: float) -> None:
        self.at = begin
        self.stages: list[Stage] = []
        self._skipped = False

    def to(
        self,
        name: str,
        end: float,
        process: Process = ROUTER,
        attempt: int = 0,
        attributes: Mapping[str, Any] = _NONE,
    ) -> None:
        """Add the stage that ended at `end`. If that is unknown (0), its time goes to `other`."""
        if not end:
            self._skipped = True
            return
        end = max(end, self.at)  # the clocks of two machines may differ a little
        if self._skipped:
            name, process, attributes, self._skipped = "other", ROUTER, _NONE, False
        self.stages.append(Stage(name, self.at, end, process, attempt, "", attributes))
        self.at = end


def to_first_token(state: RequestState) -> list[Stage]:
    """Return the stages from a request's arrival to its first token, or to its end if it had none.

    In a stream the last stage is `deliver`, once the first byte is in the client's socket.
    """
    http = state.http
    chain = _Chain(http.arrived)
    chain.to("admit", http.admitted)
    chain.to("receive", http.received)
    chain.to("render", state.taken)
    chain.to("admit", state.charged)
    for attempt in state.attempts_kept:
        if _attempt_to_token(chain, attempt):
            if attempt.held:
                chain.to("hold", state.first_token)
            if http.streams and state.first_token:
                chain.to("deliver", http.first_byte)
            return chain.stages
    if state.ended:
        chain.to("other" if state.attempts else "wait", state.ended)
    return chain.stages


def other_stages(state: RequestState) -> list[Stage]:
    """Return the stages of a finished request that `to_first_token` omits."""
    stages: list[Stage] = []
    attempts = state.attempts_kept
    for index, attempt in enumerate(attempts):
        if index and any(one.first_token for one in attempts[:index]):
            chain = _Chain(attempts[index - 1].ended or attempt.asked)
            _attempt_to_token(chain, attempt)
            stages += chain.stages
        following = attempts[index + 1].tokens_before if index + 1 < len(attempts) else len(state.tokens)
        stages += _within(attempt)
        stages += _after_token(attempt, following - attempt.tokens_before)
    last = state.timings.last_token
    ended = max(state.http.ended, state.ended)
    if last and ended > last:
        stages.append(Stage("end", last, ended))
    return stages


def seconds_by_stage(stages: Iterable[Stage]) -> dict[str, float]:
    """Return the total seconds of each stage, as a stage may occur twice."""
    found: dict[str, float] = {}
    for stage in stages:
        found[stage.name] = found.get(stage.name, 0.0) + stage.seconds
    return found


def _attempt_to_token(chain: _Chain, attempt: Timings) -> bool:
    number = attempt.number
    chain.to("wait", attempt.asked, attempt=number)
    chain.to("place", attempt.placed, attempt=number)
    if not attempt.first_token:
        if attempt.ended:
            chain.to("lost", attempt.ended, attempt.prefiller, number)
        return False
    if attempt.recomputed and attempt.recomputed < attempt.first_token:
        chain.to("lost", attempt.recomputed, attempt=number)
    if attempt.prefix_asked:
        # The prefill worker stopped waiting for the prompt's first blocks at the earlier of these times.
        fetched = min((one for one in (attempt.prefix_saved, attempt.queued) if one), default=0.0)
        chain.to("fetch", fetched, attempt=number)
    if attempt.encoded:
        encoded = min(attempt.encoded, attempt.queued or attempt.encoded)
        chain.to("encode", encoded, attempt.encoder, number, {"images": attempt.images})
    chain.to("send", attempt.queued, attempt=number)
    chain.to("queue", attempt.prefill_began, attempt.prefiller, number)
    chunks = {"chunks": attempt.chunks} if attempt.chunks else _NONE
    chain.to("prefill", attempt.prefill_ended, attempt.prefiller, number, chunks)
    chain.to("reply", attempt.first_token, attempt=number)
    return True


def _within(attempt: Timings) -> Iterator[Stage]:
    if attempt.scheduler_s and attempt.asked:  # centred: both trips are assumed to take equally long
        spare = max(0.0, attempt.placed - attempt.asked - attempt.scheduler_s) / 2
        begin, end = attempt.asked + spare, attempt.placed - spare
        yield Stage("schedule", begin, end, attempt.scheduler, attempt.number, "place")
    told = attempt.prefix
    if told is not None and attempt.queued:
        spent = sum(getattr(told, f"{part}_ms") for part in _HANDOFF) / 1e3
        attributes = {"tokens": told.tokens, "bytes": told.bytes, "transport": told.transport or "none"}
        begin = max(attempt.queued, attempt.prefix_loaded - spent)
        end = max(begin, attempt.prefix_loaded)
        yield Stage("prefix", begin, end, attempt.prefiller, attempt.number, "queue", attributes)


def _after_token(attempt: Timings, tokens: int) -> Iterator[Stage]:
    """Yield an attempt's stages from its first token on. tokens: how many the attempt generated."""
    number, decoder = attempt.number, attempt.decoder
    if attempt.saved:
        saving = attempt.saved - attempt.save_ms / 1e3
        yield Stage("handoff.save", saving, attempt.saved, attempt.prefiller, number)
    if attempt.admitted and attempt.handoff is not None:
        yield from _handoff(attempt, attempt.handoff)
    if not attempt.first_token:
        return
    begin = attempt.first_token
    if attempt.resumed:
        since = attempt.recomputed or attempt.admitted or attempt.first_token
        yield Stage("decode.first", min(since, attempt.resumed), attempt.resumed, decoder, number)
        begin = attempt.resumed
    if attempt.last_token > begin:
        spent = attempt.spent()
        accepted = sum(spent.accepted_by_position)
        attributes = {
            "tokens": tokens,
            "steps": tokens - accepted,  # each step yields the accepted draft tokens and one more
            "drafts": spent.draft_steps,
            "drafted_tokens": spent.drafted_tokens,
            "accepted_tokens": accepted,
        }
        yield Stage("decode", begin, attempt.last_token, decoder, number, "", attributes)


def _handoff(attempt: Timings, told: worker_pb2.Admitted) -> Iterator[Stage]:
    """Yield a handoff and its parts, shown one after another although moving and checking overlap."""
    attributes: dict[str, Any] = {"bytes": told.bytes, "transport": told.transport or "none"}
    if told.early_bytes:
        attributes["early_bytes"] = told.early_bytes  # moved during the prefill; part of no stage
    at = attempt.admitted - sum(getattr(told, f"{part}_ms") for part in _HANDOFF) / 1e3
    begin = min(attempt.first_token, at)  # the decode worker may start before the router has the token
    yield Stage("handoff", begin, attempt.admitted, ROUTER, attempt.number, "", attributes)
    for part in _HANDOFF:
        seconds = getattr(told, f"{part}_ms") / 1e3
        yield Stage(f"handoff.{part}", at, at + seconds, attempt.decoder, attempt.number, "handoff")
        at += seconds
