"""Admit a worker's grammars after a trial in the helper process.

There are two lanes. A grammar gets 0.5 s of CPU in the quick lane; if it needs more, it starts over in the
slow lane, with 5 s. Clients take turns in both lanes, each with one trial at a time, so one client's grammars
delay another's small schema by at most two quick trials. Verdicts are remembered for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import pickle
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from baton.protos.worker_pb2 import Failed
from baton.services.engine.errors import RequestRefused
from baton.services.engine.grammars.helper import NO_PROCESS, Helper, spawn_helper, too_large
from baton.services.engine.grammars.messages import (
    LENGTH,
    Done,
    End,
    Limits,
    Open,
    Run,
    Verdict,
    encode,
    loads,
)
from baton.services.engine.grammars.walk import STEPS

MEMORY_BYTES = 256 << 20
QUICK = Limits(cpu_s=0.5, wall_s=10.0, memory_bytes=MEMORY_BYTES, nice=5)
# Quick trials of a client that also has a grammar in the slow lane: they may be just as costly.
DOUBTFUL = replace(QUICK, nice=10)
SLOW = Limits(cpu_s=5.0, wall_s=120.0, memory_bytes=MEMORY_BYTES, nice=12)
_SLOTS = 2  # per lane, so that one client leaves a slot to the others
_FAMILIAR_S = 600.0  # how long a good verdict is remembered
_REFUSED_S = 300.0  # how long a bad verdict is remembered
_MOST_FAMILIAR = 512  # verdicts, of at most 128 KiB each
_MOST_OF_PARTY = 64  # trials of one client
_MOST = 1024  # trials of all clients
_RESTART_S = 5.0

logger = logging.getLogger(__name__)

Party = Hashable  # identifies a client


@dataclass
class _Trial:
    number: int
    party: Party
    key: bytes
    params: bytes
    future: asyncio.Future[Verdict]
    limits: Limits = QUICK
    waiters: int = 0
    runs: bool = False


@dataclass
class _Lane:
    """The waiting trials, by client, and the running ones, at most one per client."""

    slots: int
    waiting: OrderedDict[Party, deque[_Trial]] = field(default_factory=OrderedDict)
    running: dict[Party, _Trial] = field(default_factory=dict)

    def put(self, trial: _Trial) -> None:
        self.waiting.setdefault(trial.party, deque()).append(trial)

    def drop(self, trial: _Trial) -> None:
        if self.running.get(trial.party) is trial:
            del self.running[trial.party]
        queue = self.waiting.get(trial.party)
        if queue is not None:
            with contextlib.suppress(ValueError):
                queue.remove(trial)
            if not queue:
                del self.waiting[trial.party]

    def has(self, party: Party) -> bool:
        return party in self.running or party in self.waiting

    def next(self) -> _Trial | None:
        """Take the next trial that may run, from the client whose last turn was longest ago."""
        if len(self.running) >= self.slots:
            return None
        for party, queue in self.waiting.items():
            if party not in self.running:
                trial = queue.popleft()
                if queue:
                    self.waiting.move_to_end(party)
                else:
                    del self.waiting[party]
                self.running[party] = trial
                return trial
        return None


class GrammarHouse:
    """Tries grammars in the helper process. For one event loop; call `open` first and `close` last."""

    def __init__(self, helper: Helper | None = None, slow: Limits = SLOW) -> None:
        self._slow = slow
        self._helper = helper
        self._context = b""
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._restarted = -_RESTART_S
        self._lanes = {QUICK: _Lane(_SLOTS), slow: _Lane(_SLOTS)}
        self._trials: dict[int, _Trial] = {}
        self._by_key: dict[tuple[Party, bytes], _Trial] = {}
        self._known: OrderedDict[bytes, tuple[float, Verdict]] = OrderedDict()  # (valid until, verdict)
        self._number = 0
        self._closed = False

    async def open(self, context: Any) -> None:
        """Prepare the helper for a model. context: a trial.Context."""
        # The context may use classes of the model's own code, which the helper has not imported.
        self._context = await asyncio.to_thread(cloudpickle.dumps, context)
        await self._connect()

    def close(self) -> None:
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
        if self._writer is not None:
            self._writer.close()
        elif self._helper is not None:
            self._helper.connection.close()
        if self._helper is not None:
            self._helper.reap()
        self._fail_all("this worker ends")

    async def check(self, params: Any, party: Party) -> Verdict:
        """Return the verdict on the grammar of these SamplingParams.

        Raises RequestRefused: INVALID if the grammar is at fault, FULL if too many are waiting. Cancelling
        the caller ends the trial, unless another caller is waiting for the same grammar.
        """
        pickled = pickle.dumps(params)
        key = _key(params)
        until, verdict = self._known.get(key, (0.0, None))
        if verdict is None or until <= time.monotonic():
            trial = self._by_key.get((party, key)) or await self._begin(party, key, pickled)
            trial.waiters += 1
            try:
                verdict = await asyncio.shield(trial.future)
            finally:
                trial.waiters -= 1
                if not trial.waiters and not trial.future.done():
                    self._end(trial)
        if verdict.problem:
            raise RequestRefused(Failed.CODE_INVALID, verdict.problem)
        return verdict

    async def _begin(self, party: Party, key: bytes, params: bytes) -> _Trial:
        waiting = sum(1 for trial in self._trials.values() if trial.party == party)
        if waiting >= _MOST_OF_PARTY or len(self._trials) >= _MOST:
            raise _full(f"{len(self._trials)} grammars wait to be compiled here, {waiting} of this client")
        await self._connect()
        if (same := self._by_key.get((party, key))) is not None:
            return same  # another task has started it
        self._number += 1
        trial = _Trial(self._number, party, key, params, asyncio.get_running_loop().create_future())
        self._trials[trial.number] = self._by_key[party, key] = trial
        self._lanes[QUICK].put(trial)
        self._go_on()
        return trial

    def _go_on(self) -> None:
        for limits, lane in self._lanes.items():
            while (trial := lane.next()) is not None:
                trial.runs = True
                doubtful = limits is QUICK and self._lanes[self._slow].has(trial.party)
                self._send(Run(trial.number, trial.params, DOUBTFUL if doubtful else limits))

    def _end(self, trial: _Trial) -> None:
        """Drop a trial whose callers have given up. It keeps its slot until its process has ended."""
        self._by_key.pop((trial.party, trial.key), None)
        if trial.runs:
            self._send(End(trial.number))
        else:
            self._forget(trial)

    def _forget(self, trial: _Trial) -> None:
        self._trials.pop(trial.number, None)
        if self._by_key.get((trial.party, trial.key)) is trial:
            del self._by_key[trial.party, trial.key]
        self._lanes[trial.limits].drop(trial)

    def _on_done(self, done: Done) -> None:
        trial = self._trials.get(done.number)
        if trial is None:
            return
        trial.runs = False
        self._lanes[trial.limits].drop(trial)
        if done.ended_by in ("CPU", "time") and trial.limits is QUICK and trial.waiters:
            trial.limits = self._slow
            self._lanes[self._slow].put(trial)
        else:
            self._forget(trial)
            if done.ended_by == NO_PROCESS:
                _fail(trial, f"grammars cannot be compiled here: {NO_PROCESS}")
            elif trial.waiters:
                verdict = done.verdict or Verdict(problem=_why(done, trial.limits))
                self._remember(trial.key, verdict)
                if not trial.future.done():
                    trial.future.set_result(verdict)
        self._go_on()

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._known[key] = (time.monotonic() + (_REFUSED_S if verdict.problem else _FAMILIAR_S), verdict)
        self._known.move_to_end(key)
        if len(self._known) > _MOST_FAMILIAR:
            self._known.popitem(last=False)

    async def _connect(self) -> None:
        async with self._connecting:
            if self._writer is not None:
                return
            if self._closed:
                raise _full("this worker ends")
            if self._helper is None:
                if time.monotonic() - self._restarted < _RESTART_S:
                    raise _full("the process that compiles grammars here has ended")
                self._restarted = time.monotonic()
                try:
                    self._helper = spawn_helper()
                except OSError as error:
                    raise _full(
                        f"the process that compiles grammars here cannot be started: {error}"
                    ) from None
            reader, self._writer = await asyncio.open_connection(sock=self._helper.connection)
            self._reader = asyncio.create_task(self._read(reader))
            self._send(Open(self._context))

    def _send(self, message: Any) -> None:
        # The writer's buffer is bounded, because only trials with a slot are sent.
        if self._writer is not None:
            self._writer.write(encode(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._on_done(loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.warning("the process that tries grammars has ended; the next grammar starts another one")
        except Exception:
            logger.exception("the process that tries grammars sent an unreadable message; it is ended")
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._helper is not None:
            self._helper.reap()
            self._helper = None
        self._fail_all("the process that compiles grammars here has ended")

    def _fail_all(self, why: str) -> None:
        for trial in list(self._trials.values()):
            self._forget(trial)
            _fail(trial, why)


def _fail(trial: _Trial, why: str) -> None:
    if not trial.future.done():
        trial.future.set_exception(_full(why))
        trial.future.exception()  # marks the exception as retrieved, in case no caller is waiting


def _why(done: Done, limits: Limits) -> str:
    if done.ended_by == "CPU":
        return (
            f"this grammar is too costly: its compilation takes more than {limits.cpu_s:g} s; use fewer "
            "properties or alternatives, and repetitions with smaller bounds"
        )
    if done.ended_by == "time":
        return f"this grammar is too costly: its compilation took longer than {limits.wall_s:g} s"
    if done.ended_by in ("SIGKILL", "SIGABRT", "SIGBUS"):
        return too_large(limits)
    return f"this grammar cannot be compiled: its compiler ended with {done.ended_by or 'no message'}"


def _full(why: str) -> RequestRefused:
    return RequestRefused(Failed.CODE_FULL, why)


def _key(params: Any) -> bytes:
    asked = params.structured_outputs
    parts: list[Any] = [
        *(asked.json, asked.regex, asked.choice, asked.grammar, asked.json_object, asked.structural_tag),
        *(asked.disable_any_whitespace, asked.disable_additional_properties, asked.whitespace_pattern),
        *(
            params.allowed_token_ids,
            params.bad_words_token_ids,
            params.min_tokens,
            min(params.max_tokens or STEPS, STEPS),
        ),
        sorted(params.all_stop_token_ids),
    ]
    return hashlib.sha256(pickle.dumps(parts)).digest()
