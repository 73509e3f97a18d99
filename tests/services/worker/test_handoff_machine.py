"""Random events at both ends of handoffs, and invariants that hold after each.

Two real dispatchers, one that computes prompts and one that follows, with engines that only record. Calls
between them skip gRPC but use the same client and followers, on one loop. After each event, ended attempts
hold no room, engine request or call, and no request was submitted or given its token twice. At the end, each
attempt that its router did not drop has been answered once, and each save was pulled or released.
"""

import asyncio
from collections import Counter
from unittest.mock import AsyncMock

import grpc
import grpc.aio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from baton.handoff.errors import StagingFull, TransportFailed
from baton.handoff.reports import Begun, Loaded, Problem, Saved
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, PHASE_SAVE
from baton.services.engine import wire
from baton.services.engine.step import EngineStep
from baton.services.simulate.loop import VirtualLoop
from baton.services.worker import engine_gate, following, outgoing
from baton.services.worker.following import Following
from baton.services.worker.incoming import Event, State
from baton.services.worker.outgoing import NotFollowedError
from harness.fake_worker import until
from tests.services.worker.idle_worker import GRAMMAR, KEY, Worker, start, with_kv

NAMES = ("a", "b", "c")


class Site(Worker):
    def __init__(self):
        super().__init__()
        self.started = []
        self.answers = Counter()
        self.dropped = set()  # dropped by their router, so no answer is expected

    def connect(self):
        self.session = self.dispatcher.connect("router")

    def live(self):
        return self.dispatcher._attempts.all()

    def hear(self):
        """Count the answers in the replies: failures, last outputs and saves."""
        for reply in self.replies():
            over = {(one.request_id, one.epoch) for one in reply.saved}
            assert len(over) == len(reply.saved)
            over |= {(one.request_id, one.epoch) for one in reply.failed}
            assert len(over) == len(reply.saved) + len(reply.failed)
            if reply.engine_outputs:
                for output in wire.decode_outputs(reply.engine_outputs).outputs:
                    name, _, epoch = output.request_id.rpartition("#")
                    if output.finish_reason is not None:
                        over.add((name, int(epoch)))
            self.answers.update(over)

    def drop(self, attempts):
        self.dropped |= {(one.request_id, one.epoch) for one in attempts}

    def drop_request(self, name):
        self.drop([one for one in self.live() if one.request_id == name])


class Calls(Following):
    """Calls to the other dispatcher that break on demand."""

    def __init__(self, site):
        super().__init__()
        self.site = site
        self.open = []
        self._channels._open = lambda _dialler, _address: None
        self._channels._stub = lambda _channel: self

    def _close(self, _channel):
        """Leave nothing to close."""

    def Follow(self, request):
        return _Call(self, request)


class _Call:
    def __init__(self, calls, request):
        self._calls, self._request = calls, request
        self._broken = asyncio.get_running_loop().create_future()
        calls.open.append(self._broken)

    async def __aiter__(self):
        try:
            with self._calls.site.dispatcher.outgoing.follower(self._request) as follower:
                while True:
                    news = asyncio.ensure_future(follower.next())
                    try:
                        await asyncio.wait([news, self._broken], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not news.cancel():
                            news.exception()  # retrieved, so that asyncio does not log it
                    if self._broken.done():
                        raise _error(grpc.StatusCode.UNAVAILABLE, "broken")
                    reply = await news
                    yield reply
                    if not reply.HasField("begun"):
                        return
        except NotFollowedError as error:
            raise _error(error.code, str(error)) from None

    def cancel(self):
        if self._broken in self._calls.open:
            self._calls.open.remove(self._broken)


def _error(code, details):
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details)


def pick(which, found):
    return found[which % len(found)] if found else None


class Loop(VirtualLoop):
    """Virtual time, so that only the events decide what happens."""

    monotonic = VirtualLoop.time  # it replaces the module `time`


class Handoffs(RuleBasedStateMachine):
    """One request per name, whose attempts have increasing epochs."""

    def __init__(self):
        super().__init__()
        self.loop = Loop()
        engine_gate.time = outgoing.time = self.loop
        # Keyed by internal id:
        self.released = Counter()
        self.saved = set()
        self.pulled = set()
        self.epochs = dict.fromkeys(NAMES, 0)
        self.do(self._set_up)

    async def _set_up(self):
        self.p, self.d = Site(), Site()
        self.calls = Calls(self.p)
        self.d.dispatcher._entrance._following = self.calls
        self.p.dispatcher._handoffs = self.d.dispatcher._handoffs = self

    # HandoffClient

    def release_soon(self, manifest):
        self.released[manifest.request_id] += 1

    def close(self):
        pass

    def do(self, what, *given):
        """Call `what` on the loop, and run everything that follows."""

        async def work():
            found = what(*given)
            if asyncio.iscoroutine(found):
                await found
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(work())

    def teardown(self):
        async def over():
            for site in (self.p, self.d):
                site.drop(site.live())
                site.hear()
                site.dispatcher.disconnect(site.session)
                site.dispatcher.hang_up()
                await site.dispatcher.close()

        try:
            self.do(over)
        finally:
            self.loop.close()
        self.nothing_is_held()
        assert self.p.dispatcher.outgoing.followers == 0
        for site in (self.p, self.d):
            for name, epoch, _ in site.started:
                wanted = (name, epoch) not in site.dropped
                answers = site.answers[name, epoch]
                assert answers == 1 if wanted else answers <= 1, (name, epoch, answers)
        for internal_id in self.saved:
            # Twice: a prompt's first records, and then the save of the current step.
            assert (internal_id in self.pulled) or 1 <= self.released[internal_id] <= 2, internal_id

    # Routers.

    def _start(self, site, message):
        site.started.append((message.request_id, message.epoch, message.phase))
        site.drop_request(message.request_id)
        site.dispatcher.start(site.session, message)

    @rule(
        name=st.sampled_from(NAMES),
        order=st.sampled_from(["both", "decode first", "prefill first", "decode alone", "prefill alone"]),
        kind=st.sampled_from(["plain", "grammar", "beginning", "wrong key", "no source"]),
    )
    def start(self, name, order, kind):
        """Start an attempt, of which one half may be lost."""
        self.epochs[name] += 1
        epoch = self.epochs[name]
        save = kind == "beginning"
        prefill = start(name, epoch, PHASE_SAVE if save else PHASE_PREFILL)
        prefill.prefix_tokens = 10 if save else 0
        sampling = GRAMMAR if kind == "grammar" else {}
        decode = start(name, epoch, PHASE_PREFILL if save else PHASE_DECODE, **sampling)
        if kind != "no source":
            key = b"sixteen others ." if kind == "wrong key" else KEY
            with_kv(decode, address="p:1", key=key)
        halves = [(self.p, prefill), (self.d, decode)]
        if order == "decode first":
            halves.reverse()
        if order.endswith("alone"):
            halves = [halves[order == "decode alone"]]
        for site, message in halves:
            self.do(self._start, site, message)

    @rule(name=st.sampled_from(NAMES), at=st.sampled_from("pd"))
    def abort(self, name, at):
        site = self.p if at == "p" else self.d
        site.drop_request(name)
        self.do(site.dispatcher.abort, [name])

    @rule(at=st.sampled_from("pd"))
    def lose_the_router(self, at):
        site = self.p if at == "p" else self.d
        site.drop(site.live())
        site.hear()
        self.do(site.dispatcher.disconnect, site.session)
        site.connect()

    @rule()
    def try_one_alone(self):
        """Start a suspect, so that the gate holds other requests."""
        self.epochs.setdefault("alone", 0)
        self.epochs["alone"] += 1
        message = start("alone", self.epochs["alone"])
        message.alone_tokens = 4
        self.do(self._start, self.d, message)

    @rule()
    def end_the_trial(self):
        async def ended():
            self.d.drop_request("alone")
            self.d.dispatcher.abort(["alone"])
            gate = self.d.dispatcher._gate
            await until(lambda: not gate._holds and not gate._alone, "the gate is open")

        self.do(ended)

    # The call between the workers.

    @rule(which=st.integers(0, 5))
    def break_a_call(self, which):
        if call := pick(which, self.calls.open):
            self.do(call.set_result, None)

    @rule(which=st.integers(0, 5))
    def lose_patience(self, which):
        incoming = pick(which, [one.incoming for one in self.d.live() if one.incoming and one.incoming.waits])
        if incoming is not None:
            self.do(incoming.on_failed, Event.LATE, Problem.of(TransportFailed("late")))
            if incoming.call is not None:  # its deadline would end the call
                self.do(incoming.call.cancel)

    # P's engine.

    def _computing(self, which):
        return pick(which, [one for one in self.p.live() if one.inside])

    def _manifest(self, attempt):
        self.saved.add(attempt.internal_id)
        return Manifest(request_id=attempt.internal_id, epoch=attempt.epoch, lease_s=600.0)

    @rule(which=st.integers(0, 5))
    def begin_to_save(self, which):
        attempt = self._computing(which)
        if attempt is None or attempt.prepared.saves is False:
            return
        handoff = self.p.dispatcher.outgoing._handoffs[attempt.request_id]
        if handoff.state is outgoing.State.PROMISED:
            begun = Begun(attempt.internal_id, attempt.epoch, self._manifest(attempt))
            self.do(self.p.dispatcher.on_step, EngineStep(begun=(begun,)))

    @rule(
        which=st.integers(0, 5),
        how=st.sampled_from(["kept", "kept", "kept", "lost", "stopped", "full", "broke"]),
    )
    def end_a_prompt(self, which, how):
        attempt = self._computing(which)
        if attempt is None:
            return
        self.p.engine.end(attempt.internal_id)
        name, epoch = attempt.internal_id, attempt.epoch
        if how == "full":
            step = EngineStep(saved=(Saved(name, epoch, None, Problem.of(StagingFull("no room"))),))
        elif how == "broke":
            step = EngineStep(failed=[name], problem="shape mismatch")
        else:
            reason = FinishReason.STOP if how == "stopped" else FinishReason.LENGTH
            attempt.prepared.request.append_output_token_ids([7])
            output = EngineCoreOutput(request_id=name, new_token_ids=[7], finish_reason=reason)
            outputs = {attempt.session: EngineCoreOutputs(outputs=[output])}
            manifest = self._manifest(attempt) if how != "lost" else None
            problem = Problem("SaveFailed", "no") if manifest is None else None
            step = EngineStep(outputs=outputs, saved=(Saved(name, epoch, manifest, problem),), executed=True)
        self.do(self.p.dispatcher.on_step, step)

    @rule(which=st.integers(0, 5))
    def pull_all(self, which):
        """Pull a save: its ranks no longer hold it at the next renewal."""
        handoffs = self.p.dispatcher.outgoing
        asked = handoffs.to_renew()
        kept = [one.manifest for one in handoffs._leased.values() if one.state is outgoing.State.KEPT]
        if one := pick(which, kept):
            self.pulled.add(one.request_id)
            held = {(other.request_id, other.epoch) for other in asked if other is not one}
            self.do(handoffs.renewed, asked, held, self.loop.time())

    # D's engine.

    @rule(which=st.integers(0, 5), problem=st.booleans())
    def load(self, which, problem):
        inside = [one for one in self.d.live() if one.inside]
        loading = [one for one in inside if one.incoming and one.incoming.state is State.COMPLETE]
        if (attempt := pick(which, loading)) is None:
            return
        why = Problem.of(TransportFailed("the way is cut")) if problem else None
        loaded = Loaded(attempt.internal_id, attempt.epoch, problem=why)
        self.do(self.d.dispatcher.on_step, EngineStep(loaded=(loaded,)))

    @rule(which=st.integers(0, 5), last=st.booleans())
    def write(self, which, last):
        """Generate a token of a request that has its KV."""
        inside = [one for one in self.d.live() if one.inside]
        running = [one for one in inside if one.incoming is None or not one.incoming.loads]
        if (attempt := pick(which, running)) is None:
            return
        reason = FinishReason.STOP if last else None
        if last:
            self.d.engine.end(attempt.internal_id)
        output = EngineCoreOutput(request_id=attempt.internal_id, new_token_ids=[9], finish_reason=reason)
        outputs = {attempt.session: EngineCoreOutputs(outputs=[output])}
        self.do(self.d.dispatcher.on_step, EngineStep(outputs=outputs, executed=True))

    # Invariants.

    @invariant()
    def nothing_is_held(self):
        for site in (self.p, self.d):
            site.hear()
            live = site.live()
            admission = site.dispatcher._admission
            assert admission.requests + admission.extras == len(live)
            inside = {one.internal_id for one in live if one.inside}
            waits = set(site.engine.requests) - inside
            assert inside <= set(site.engine.requests), (set(site.engine.requests), inside)
            assert waits <= {one.internal_id for one in live if one.incoming is not None}, waits
            assert not any(site.engine.loading.get(one) == "given" for one in waits), "it has its token"
            alone = site.dispatcher._gate._now
            assert alone is None or inside == {alone.internal_id}, "it is not alone"
            assert max(site.answers.values(), default=0) <= 1, site.answers
        waiting = sum(one.incoming is not None and one.incoming.waits for one in self.d.live())
        assert self.calls.calls == waiting
        assert len(self.calls.open) == waiting
        assert self.p.dispatcher.outgoing.followers <= waiting
        for attempt in self.d.live():
            given = self.d.engine.loading.get(attempt.internal_id)
            if attempt.inside and attempt.incoming is not None and given is not None:
                assert attempt.incoming.state is not State.ASKED


def test_handoffs_hold_nothing_and_do_nothing_twice(monkeypatch):
    monkeypatch.setattr(following, "_connected", AsyncMock(return_value=True))
    monkeypatch.setattr(following, "PAUSE_S", 0.0)
    for module in (engine_gate, outgoing):
        monkeypatch.setattr(module, "time", None)  # set by each machine, restored afterwards
    for name, value in (("GRACE_S", 0.0), ("TURN_S", 60.0), ("LINGER_S", 0.0), ("LEAST_REST_S", 0.001)):
        monkeypatch.setattr(engine_gate, name, value)
    often = settings(max_examples=30, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Handoffs, settings=often)
