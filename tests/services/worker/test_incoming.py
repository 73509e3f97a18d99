"""Incoming KV: an attempt is submitted once, gets its token once, and fails at most once."""

from itertools import product

import pytest

from baton.handoff.errors import NoCommonTransport, SaveFailed, SourceTimeout, TransportFailed
from baton.handoff.reports import Problem
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Complete, Failed, Start
from baton.services.engine.errors import RequestRefused
from baton.services.worker.incoming import OPTIONAL, TRANSITIONS, Event, Incoming, State, code_of

PROBLEM = Problem("SaveFailed", "it is not kept")
KINDS = ("in the engine", "held", "beginning")


class Seams:
    """Records the calls, and refuses on demand."""

    def __init__(self):
        self.done = []
        self.codes = []
        self.refuses = set()

    def _do(self, what):
        if what in self.refuses:
            raise RequestRefused(Failed.CODE_HANDOFF, f"{what}: no")
        self.done.append(what)

    def enter(self, _attempt, _start, complete):
        self._do("enter with KV" if complete is not None else "enter without")

    def begin_load(self, _attempt, _manifest):
        self._do("begin")

    def resume(self, _attempt, _complete):
        self._do("resume")

    def fail(self, _attempt, code, _problem):
        self.done.append("fail")
        self.codes.append(code)

    def do_without(self, _attempt, _problem):
        self.done.append("without")


def made(kind, seams):
    start = Start(phase=PHASE_PREFILL if kind == "beginning" else PHASE_DECODE)
    return Incoming(None, start, seams, held=kind != "in the engine")


def send(incoming, event):
    match event:
        case Event.BEGUN:
            incoming.on_begun(Manifest())
        case Event.COMPLETE:
            incoming.on_complete(Complete())
        case Event.LOADED | Event.FAILED:
            incoming.hear(event)
        case Event.CANCELLED:
            incoming.cancel()
        case _:
            incoming.on_failed(event, PROBLEM)


def test_the_tables_cover_every_state_and_event():
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.OVER}
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert {*TRANSITIONS.values(), *OPTIONAL.values()} == set(State) - {State.ASKED}
    assert set(OPTIONAL) <= set(TRANSITIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_all_sequences_of_four_events(kind):
    for events in product(Event, repeat=4):
        seams = Seams()
        incoming = made(kind, seams)
        for event in events:
            before, done = incoming.state, len(seams.done)
            send(incoming, event)
            assert before is not State.OVER or (incoming.state, len(seams.done)) == (State.OVER, done)
        submitted = [one for one in seams.done if one.startswith("enter")]
        assert len(submitted) <= (kind != "in the engine"), events
        assert seams.done.count("resume") <= (kind == "in the engine"), events
        assert seams.done.count("fail") <= 1, events
        assert ("fail" in seams.done) <= (incoming.state is State.OVER), events
        assert seams.done.count("begin") <= (kind == "in the engine"), events
        assert not ("fail" in seams.done and submitted == ["enter without"]), events


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", [False, True])
def test_kv_that_arrives(kind, begun):
    seams = Seams()
    incoming = made(kind, seams)
    if begun:
        send(incoming, Event.BEGUN)
    assert incoming.waits
    send(incoming, Event.COMPLETE)
    assert (incoming.waits, incoming.loads) == (False, True)
    send(incoming, Event.LOADED)
    assert not incoming.loads
    if kind == "in the engine":
        assert seams.done == ["begin", "resume"][not begun :]
    else:
        assert seams.done == ["enter with KV"]


@pytest.mark.parametrize("event", [Event.REFUSED, Event.LOST, Event.LATE, Event.WRONG])
@pytest.mark.parametrize("begun", [False, True])
def test_a_source_that_fails(event, begun):
    for kind in KINDS:
        seams = Seams()
        incoming = made(kind, seams)
        if begun:
            send(incoming, Event.BEGUN)
        send(incoming, event)
        if kind == "beginning":
            assert seams.done == ["without", "enter without"]
            assert incoming.state is State.WHOLE
        else:
            assert seams.done[-1] == "fail"
            assert incoming.state is State.OVER


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_that_does_not_fit(kind):
    seams = Seams()
    incoming = made(kind, seams)
    seams.refuses |= {"resume", "enter with KV"}
    send(incoming, Event.COMPLETE)
    if kind == "beginning":
        assert seams.done == ["without", "enter without"]
    else:
        assert (seams.done, seams.codes) == (["fail"], [Failed.CODE_HANDOFF])


def test_a_request_that_cannot_be_built_with_or_without_kv_fails_once():
    seams = Seams()
    incoming = made("beginning", seams)
    seams.refuses |= {"enter with KV", "enter without"}
    send(incoming, Event.COMPLETE)
    assert (seams.done, seams.codes) == (["without", "fail"], [Failed.CODE_HANDOFF])


def test_only_a_transport_failure_blames_the_source():
    for error in (TransportFailed("gone"), NoCommonTransport("none")):
        assert code_of(Problem.of(error)) == Failed.CODE_SOURCE
    for other in (SaveFailed("no"), SourceTimeout("slow")):
        assert code_of(Problem.of(other)) == Failed.CODE_HANDOFF
