"""A worker's dispatcher forgets a request when it ends, however it ends, and renews leases in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsTensors

from baton.handoff.reports import Begun
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import (
    PHASE_DECODE,
    PHASE_PREFILL,
    Complete,
    Failed,
    Phase,
    RunReply,
    Source,
    Start,
)
from baton.services.config import SchedulerSettings
from baton.services.engine import outputs, wire
from baton.services.engine.build import EngineInfo
from baton.services.engine.errors import RequestRefused
from baton.services.engine.host import EngineStep
from baton.services.roles import MIXED
from baton.services.worker import dispatcher as module
from baton.services.worker.dispatcher import Dispatcher
from baton.services.worker.incoming import Incoming
from baton.services.worker.metrics import WorkerMetrics
from harness.fake_worker import until
from harness.support import PATIENCE
from tests.services.worker.router import StructuredOutputsParams, prompt, request

INFO = EngineInfo(1024, 32, 64, 63, 8, 256, 1, 300, drafts_always=False)


class Host:
    """An engine that takes everything and answers nothing."""

    block_hasher = None

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.begun: list[str] = []
        self.resumed: list[str] = []

    def submit(self, request: Any) -> None:
        self.submitted.append(request.request_id)

    def abort(self, internal_ids: list[str]) -> None:
        self.aborted += internal_ids

    def begin_load(self, internal_id: str, _epoch: int, _manifest: Manifest) -> None:
        self.begun.append(internal_id)

    def resume(self, internal_id: str, _epoch: int, _manifest: Manifest, _give_tokens: Any) -> None:
        self.resumed.append(internal_id)


class Compilers:
    """Grammar compilers that break, or take their time, on demand."""

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.compiled = asyncio.Event()
        self.compiled.set()
        self.cancelled = 0
        self.parties: list[int] = []

    async def prepare(self, _request: Any, party: int) -> None:
        self.parties.append(party)
        try:
            await self.compiled.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.broken is not None:
            raise self.broken

    def close(self) -> None:
        pass


KEY = b"sixteen bytes ok"


def start(name: str, epoch: int = 1, phase: Phase = PHASE_DECODE, **params: Any) -> Start:
    core = request(name, prompt(20), **params)
    encoded = wire.encode_request(core)
    key = KEY if phase != PHASE_DECODE else b""
    return Start(request_id=name, epoch=epoch, phase=phase, engine_request=encoded, key=key)


GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="a+")}


async def made(host: Host, compilers: Compilers | None = None) -> tuple[Dispatcher, WorkerMetrics]:
    metrics = WorkerMetrics()
    limits = SchedulerSettings(max_queue_factor=1.0)
    dispatcher = Dispatcher(
        MIXED, limits, cast(Any, host), metrics, None, grammars=cast(Any, compilers or Compilers())
    )
    dispatcher.open(replace(INFO, max_num_seqs=4))
    return dispatcher, metrics


class SilentRanks:
    """Ranks that answer no renewal, and the clock of whoever calls them; it goes on by what they wait."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._began = self._now = time.monotonic()
        self.asked_at: list[float] = []  # since the begin

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Raise EOFError after so many turns."""
        self._turns -= 1
        if not self._turns:
            raise EOFError
        self._now += seconds

    def renew(self, manifests: Iterable[Manifest], timeout_s: float) -> set[tuple[str, int]]:
        self.asked_at.append(self._now - self._began)
        self._now += timeout_s
        return {(one.request_id, one.epoch) for one in manifests}


async def replies(session: Any) -> list[Failed]:
    """Return the next reply."""
    async with asyncio.timeout(5 * PATIENCE):
        return list((await session._queue.get()).failed)


@pytest.mark.parametrize("error", [ValueError("no such rule"), RuntimeError("the compiler broke")])
async def test_a_grammar_that_cannot_be_compiled_ends_its_request(error: Exception) -> None:
    host, compilers = Host(), Compilers()
    compilers.broken = error
    dispatcher, _ = await made(host, compilers)
    session = dispatcher.connect("router")
    dispatcher.start(session, start("a", **GRAMMAR))
    [failed] = await replies(session)
    assert failed.code == Failed.CODE_INVALID
    assert str(error) in failed.message
    assert dispatcher.requests == 0
    assert host.submitted == []


async def test_a_request_aborted_while_its_grammar_is_compiled_never_reaches_the_engine() -> None:
    host, compilers = Host(), Compilers()
    compilers.compiled.clear()
    dispatcher, _ = await made(host, compilers)
    session = dispatcher.connect("router")
    dispatcher.start(session, start("a", **GRAMMAR))
    [task] = dispatcher._entrance._compiling
    await asyncio.sleep(0)
    dispatcher.abort(["a"])
    async with asyncio.timeout(5 * PATIENCE):
        await asyncio.wait([task])
    assert (dispatcher.requests, host.submitted, compilers.cancelled) == (0, [], 1)


async def test_clients_of_one_router_take_turns_as_it_numbers_them() -> None:
    compilers = Compilers()
    dispatcher, _ = await made(Host(), compilers)
    session = dispatcher.connect("router")
    for name, party in (("a", 7), ("b", 0)):
        one = start(name, **GRAMMAR)
        one.party = party
        dispatcher.start(session, one)
    async with asyncio.timeout(5 * PATIENCE):
        await asyncio.gather(*dispatcher._entrance._compiling)
    assert compilers.parties == [7, -session.number]  # a router that does not tell them apart is one client


async def test_a_router_that_is_gone_leaves_nothing() -> None:
    host = Host()
    dispatcher, _ = await made(host)
    gone, stays = dispatcher.connect("gone"), dispatcher.connect("stays")
    for name, session in (("a", gone), ("b", gone), ("c", stays)):
        dispatcher.start(session, start(name))
    dispatcher.disconnect(gone)
    assert host.aborted == ["a#1", "b#1"]
    assert dispatcher.requests == 1


async def test_refusals_are_counted_by_their_reason() -> None:
    dispatcher, metrics = await made(Host())
    session = dispatcher.connect("router")

    def count(why: str) -> float:
        return metrics.registry.get_sample_value("baton_worker_requests_refused_total", {"why": why}) or 0.0

    dispatcher.start(session, start("a", epoch=3))
    dispatcher.start(session, start("a", epoch=2))  # late
    assert [one.code for one in await replies(session)] == [Failed.CODE_STALE]
    assert count("stale") == 1
    assert dispatcher.requests == 1
    for number in range(4):
        dispatcher.start(session, start(f"more {number}"))
    assert count("full") == 1
    dispatcher.drain()
    dispatcher.start(session, start("b"))
    assert count("draining") == 1


def with_kv(begun: Start, tokens: int = 20) -> Start:
    """Let its KV be at another worker, which nobody has asked yet."""
    source = Source(worker_id="p", address="127.0.0.1:9", request_id=begun.request_id, key=KEY, tokens=tokens)
    begun.source.CopyFrom(source)
    return begun


def complete(*tokens: int) -> Complete:
    return Complete(manifest=Manifest(request_id="a#1", epoch=1, num_tokens=20), token_ids=tokens)


def incoming(dispatcher: Dispatcher, internal_id: str) -> Incoming:
    attempt = dispatcher._attempts.live(internal_id)
    assert attempt is not None
    assert attempt.incoming is not None
    return attempt.incoming


async def test_an_engine_that_still_holds_a_load_is_no_final_refusal() -> None:
    dispatcher, _ = await made(Host())
    session = dispatcher.connect("router")
    dispatcher.start(session, with_kv(start("a")))
    dispatcher.on_refused("a#1", RequestRefused(Failed.CODE_FULL, "not yet"))
    [failed] = await replies(session)
    assert (failed.code, failed.message) == (Failed.CODE_FULL, "not yet")
    assert dispatcher.requests == 0


async def test_a_decode_is_in_the_engine_before_its_prompt_is_complete() -> None:
    host = Host()
    dispatcher, _ = await made(host)
    dispatcher.start(dispatcher.connect("router"), with_kv(start("a")))
    assert host.submitted == ["a#1"]
    comes = incoming(dispatcher, "a#1")
    comes.on_begun(Manifest(request_id="a#1", epoch=1))
    comes.on_complete(complete(7))
    assert (host.begun, host.resumed) == (["a#1"], ["a#1"])


async def test_what_needs_its_first_token_is_built_when_that_is_there() -> None:
    host, compilers = Host(), Compilers()
    dispatcher, _ = await made(host, compilers)
    dispatcher.start(dispatcher.connect("router"), with_kv(start("a", **GRAMMAR)))
    comes = incoming(dispatcher, "a#1")
    comes.on_begun(Manifest(request_id="a#1", epoch=1))
    assert (host.submitted, host.begun) == ([], [])
    comes.on_complete(complete(ord("a")))
    await until(lambda: host.submitted == ["a#1"], "its grammar is compiled")
    assert host.resumed == []


async def test_tokens_that_do_not_go_on_fail_the_decode() -> None:
    host = Host()
    dispatcher, _ = await made(host)
    session = dispatcher.connect("router")
    dispatcher.start(session, with_kv(start("a")))
    incoming(dispatcher, "a#1").on_complete(complete())
    [failed] = await replies(session)
    assert failed.code == Failed.CODE_HANDOFF
    assert (host.aborted, dispatcher.requests) == (["a#1"], 0)


@pytest.mark.parametrize("missing", ["address", "key"])
async def test_a_source_that_cannot_be_asked_is_refused(missing: str) -> None:
    dispatcher, _ = await made(Host())
    session = dispatcher.connect("router")
    message = with_kv(start("a"))
    message.source.ClearField(missing)  # type: ignore[arg-type]
    dispatcher.start(session, message)
    [failed] = await replies(session)
    assert failed.code == Failed.CODE_INVALID
    assert "a source needs an address and a key" in failed.message


async def test_a_source_that_is_not_there_fails_its_decode_alone() -> None:
    """Its port is closed."""
    host = Host()
    dispatcher, metrics = await made(host)
    session = dispatcher.connect("router")
    dispatcher.start(session, start("b"))
    dispatcher.start(session, with_kv(start("a")))
    [failed] = await replies(session)
    assert (failed.request_id, failed.code) == ("a", Failed.CODE_SOURCE)
    assert "worker p at 127.0.0.1:9" in failed.message
    assert (host.aborted, dispatcher.requests) == (["a#1"], 1)
    count = "baton_worker_handoffs_load_failed_total"
    assert metrics.registry.get_sample_value(count, {"error": "TransportFailed"}) == 1
    await dispatcher.close()


async def test_a_prompt_whose_beginning_does_not_come_is_computed_whole() -> None:
    host = Host()
    dispatcher, _ = await made(host)
    dispatcher.start(dispatcher.connect("router"), with_kv(start("a", phase=PHASE_PREFILL), 10))
    assert host.submitted == []
    await until(lambda: host.submitted == ["a#1"], "it is computed")
    assert dispatcher.requests == 1
    await dispatcher.close()


async def test_what_waits_for_its_kv_did_not_break_the_engine() -> None:
    """A router tries the others alone, and places these again."""
    dispatcher, _ = await made(Host())
    session = dispatcher.connect("router")
    for name in ("runs", "loaded", "waits"):
        dispatcher.start(session, start(name) if name == "runs" else with_kv(start(name)))
    incoming(dispatcher, "loaded#1").on_complete(complete(7))
    dispatcher.on_failure(RuntimeError("CUDA error"))
    codes = {one.request_id: one.code for one in await replies(session)}
    assert codes == {
        "runs": Failed.CODE_ENGINE,
        "loaded": Failed.CODE_ENGINE,
        "waits": Failed.CODE_DRAINING,
    }
    await dispatcher.close()


async def test_a_renewal_that_fails_leaves_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin each third of a lease, however long the one before took."""
    dispatcher, _ = await made(Host())
    session = dispatcher.connect("router")
    dispatcher.start(session, start("a", phase=PHASE_PREFILL))
    manifest = Manifest(request_id="a#1", epoch=1, lease_s=60.0)
    dispatcher.on_step(EngineStep(begun=(Begun("a#1", 1, manifest),)))
    ranks = SilentRanks(turns=3)
    monkeypatch.setattr(dispatcher, "_handoffs", ranks)
    monkeypatch.setattr(module, "time", ranks)
    monkeypatch.setattr(module.asyncio, "sleep", ranks.sleep)
    with pytest.raises(EOFError):
        await dispatcher.renew_leases(20.0)
    assert ranks.asked_at == pytest.approx([0.0, 20.0, 40.0])


def with_logprobs(name: str, entries: int) -> EngineCoreOutput:
    rows = LogprobsTensors(
        torch.zeros(entries, 1, dtype=torch.int32), torch.zeros(entries, 1), torch.zeros(entries)
    )
    return EngineCoreOutput(request_id=f"{name}#1", new_token_ids=[7], new_prompt_logprobs_tensors=rows)


async def sent(dispatcher: Dispatcher, session: Any, *step: EngineCoreOutput) -> list[RunReply]:
    """Return a step's replies to a router."""
    outputs_of_step = EngineCoreOutputs(outputs=list(step), timestamp=1.0)
    dispatcher.on_step(EngineStep(outputs={session.number: outputs_of_step}, executed=True))
    return [session._queue.get_nowait() for _ in range(session._queue.qsize())]


def names(reply: RunReply) -> list[str]:
    decoded = wire.decode_outputs(reply.engine_outputs)
    assert decoded.timestamp == 1.0
    return [output.request_id for output in decoded.outputs]


async def test_a_step_that_brings_much_goes_in_several_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "REPLY_BYTES", 100_000)
    dispatcher, _ = await made(Host())
    session = dispatcher.connect("router")
    for name in "abcd":
        dispatcher.start(session, start(name))
    plain = EngineCoreOutput(request_id="d#1", new_token_ids=[7])
    step = [with_logprobs("a", 7_000), with_logprobs("b", 2_000), with_logprobs("c", 3_000), plain]
    replies = await sent(dispatcher, session, *step)
    assert [names(reply) for reply in replies] == [["a#1"], ["b#1", "c#1", "d#1"]]
    assert all(reply.ByteSize() < 100_000 for reply in replies)
    assert [names(one) for one in await sent(dispatcher, session, plain)] == [["d#1"]]


async def test_what_no_message_can_hold_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "REPLY_BYTES", 100_000)
    host = Host()
    dispatcher, _ = await made(host)
    session = dispatcher.connect("router")
    for name in "ab":
        dispatcher.start(session, start(name))
    [reply] = await sent(dispatcher, session, with_logprobs("a", 10_000), with_logprobs("b", 10))
    [failed] = reply.failed
    assert (failed.request_id, failed.code) == ("a", Failed.CODE_INVALID)
    assert "log-probabilities" in failed.message
    assert names(reply) == ["b#1"]
    assert (host.aborted, dispatcher.requests) == (["a#1"], 1)
