"""The policy's choices and rejections."""

import random
from dataclasses import replace
from math import comb

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import BadPolicy
from baton.scheduler.need import Adapter
from baton.scheduler.policy import NoChoice, Policy, WorkerChoice
from baton.scheduler.policy import choose as choose_module
from baton.scheduler.policy.parts import Best, FreeBlocks, QueuedPromptTokens, RunningRequests, StagingRoom
from baton.scheduler.types import FleetView, Reserved, WorkerRecord
from baton.services.config import PolicySettings
from harness.scheduling import LIMITS, identity, need

P, D, M = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED
CROWDED = Reserved(prompt_tokens=1_000, requests=8, blocks=99)


def worker(name, role, reserved=None, *, state=pb.WORKER_STATE_READY, load=None, drain=False, **changes):
    who = identity(name, role, **changes)
    return WorkerRecord(who, state, load, reserved or Reserved(), drain, 5.0)


def choose(what, *workers, handoff_min=0, idle_decode=LIMITS.idle_decode_tokens, **config):
    """Return (prefill, decode) or (code, message)."""
    limits = replace(LIMITS, handoff_min_tokens=handoff_min, idle_decode_tokens=idle_decode)
    view = FleetView({one.worker_id: one for one in workers})
    options = PolicySettings(picker="best", **config)
    choice = Policy(limits, options, random.Random(1)).choose(view, what)
    if isinstance(choice, WorkerChoice):
        return (choice.prefill.worker_id if choice.prefill else "", choice.decode.worker_id)
    assert isinstance(choice, NoChoice)
    return (pb.Rejection.Code.Name(choice.code).removeprefix("CODE_"), choice.message)


def pair_of(first, second):
    """Return a prefill worker and two decode workers with these bookings."""
    return [worker("p", P), worker("a", D, first), worker("b", D, second)]


FULL_PREFILL = (
    "no worker can prefill: all are full (p: 1000 of 1000 prompt tokens: scheduler.max_queued_prompt_tokens)"
)
CHOICES = {
    "no worker": ([], ("NO_WORKERS", "no worker to take the request is registered")),
    "a pair before a mixed worker": ([worker("m", M), worker("d", D), worker("p", P)], ("p", "d")),
    "a full prefill worker": ([worker("p", P, CROWDED), worker("d", D)], ("FULL", FULL_PREFILL)),
    "another full one": ([worker("p", P, CROWDED), worker("d", D), worker("m", M)], ("", "m")),
    "a full decode worker": ([worker("p", P), worker("d", D, CROWDED), worker("m", M)], ("", "m")),
    "fewest requests": (pair_of(Reserved(requests=2), Reserved(requests=1)), ("p", "b")),
    "most free blocks": (pair_of(Reserved(blocks=20), Reserved(blocks=40)), ("p", "a")),
    "fewest queued tokens": (
        [worker("long", P, Reserved(500)), worker("short", P, Reserved(20)), worker("d", D)],
        ("short", "d"),
    ),
    "compatible KV": (
        [
            worker(name, role, Reserved(requests=n), compatibility_hash=kind)
            for name, role, n, kind in (("p", P, 0, "aa"), ("free", D, 0, "bb"), ("busy", D, 3, "aa"))
        ],
        ("p", "busy"),
    ),
    "a heartbeat above the bookings": (
        [
            worker("p", P),
            worker("a", D, load=pb.WorkerLoad(running=4, waiting=2, free_blocks=10)),
            worker("b", D, load=pb.WorkerLoad(free_blocks=99)),
        ],
        ("p", "b"),
    ),
}


@pytest.mark.parametrize(("workers", "chosen"), CHOICES.values(), ids=CHOICES)
def test_choices(workers, chosen):
    assert choose(need(), *workers) == chosen


def test_a_request_needs_workers_with_its_adapter():
    """Both workers must have it, with the same files as the router."""
    wanted = replace(need(), adapter=Adapter("sql", "f5"))
    able = [worker("p1", P), worker("d1", D)]
    unable = [worker("p2", P), worker("d2", D), worker("m", M)]
    for one in able:
        one.capacity.adapters["sql"] = "f5"
    unable[0].capacity.adapters["sql"] = "f6"
    assert choose(wanted, *unable, *able) == ("p1", "d1")
    assert choose(need(), *unable) == ("p2", "d2")
    assert choose(wanted, *unable, able[0]) == ("", "p1")  # also decodes
    code, message = choose(wanted, unable[2])
    assert code == "NO_WORKERS"
    assert message.endswith(": m does not have the adapter 'sql' (engine.lora)")
    message = choose(wanted, unable[0])[1]
    assert message.endswith(": p2 has other files than the router under the adapter's name 'sql'")


def test_two_revisions_and_two_versions_of_vllm():
    """Pairs have equal weights. Requests that have begun keep their weights, and routers their vLLM."""
    old = [worker("p1", P), worker("d1", D)]
    new = [worker("p2", P, fingerprint="f2"), worker("d2", D, fingerprint="f2")]
    later = [worker("p3", P, vllm="0.33.0"), worker("d3", D, vllm="0.33.0")]
    for first in (old, new):
        busy = [worker(one.worker_id, one.role, CROWDED) if one.role == P else one for one in first]
        other = new if first is old else old
        assert choose(need(), *busy, *other) == (other[0].worker_id, other[1].worker_id)
    assert "have different weights (f1, f2)" in choose(need(), old[0], new[1])[1]
    for wanted, pair in (("f1", ("p1", "d1")), ("f2", ("p2", "d2"))):
        assert choose(replace(need(), model_fingerprint=wanted), *old, *new) == pair
    for wanted, pair in (("0.32.0", ("p1", "d1")), ("0.33.0", ("p3", "d3"))):
        assert choose(replace(need(), vllm_version=wanted), *old, *later) == pair
    code, message = choose(replace(need(), model_fingerprint="f2"), *old, worker("m", M))
    assert code == "NO_WORKERS"
    assert "not the weights that began the output" in message


@pytest.mark.parametrize(("prompt", "expected"), [(99, ("", "d")), (100, ("p", "d"))])
def test_a_short_prompt_is_not_handed_over(prompt, expected):
    assert choose(need(prompt=prompt), worker("p", P), worker("d", D), handoff_min=100) == expected


def test_a_short_prompt_goes_to_the_best_mixed_or_decode_worker():
    busy = Reserved(requests=3, blocks=30)
    assert choose(need(), worker("d", D, busy), worker("m", M), worker("p", P), handoff_min=500) == ("", "m")
    assert choose(need(), worker("d", D), worker("m", M, busy), worker("p", P), handoff_min=500) == ("", "d")


@pytest.mark.parametrize(
    "lost",
    [
        [],
        [worker("p", P, state=pb.WORKER_STATE_STARTING)],
        [worker("p", P, state=pb.WORKER_STATE_DRAINING)],
        [worker("p", P, drain=True)],
        [worker("failed", P)],
    ],
)
def test_a_decode_worker_stands_in_for_lost_prefill_workers(lost):
    assert choose(need("r", 2, 100, 10, "failed"), worker("d", D), *lost) == ("", "d")


IDLE = pb.WorkerLoad(free_blocks=99)


def test_an_idle_decode_worker_prefills_while_others_queue():
    """It does so only while its own queue is shorter and it decodes nothing."""

    def chosen(queued, own, load, decoding=1):
        reader, booked = worker("p", P, Reserved(prompt_tokens=queued)), Reserved(own, decoding=decoding)
        return choose(need(prompt=100), reader, worker("d", D, booked, load=load))

    pair, alone = ("p", "d"), ("", "d")
    assert chosen(0, 0, IDLE) == pair
    assert chosen(300, 0, IDLE) == alone
    assert chosen(300, 200, IDLE) == alone
    assert chosen(300, 300, IDLE) == pair
    assert chosen(300, 0, None, decoding=0) == pair  # no heartbeat yet
    running, waiting = (pb.WorkerLoad(free_blocks=99, **{what: 1}) for what in ("running", "waiting"))
    assert chosen(300, 0, running) == pair
    assert chosen(300, 0, waiting) == pair
    assert chosen(300, 0, running, decoding=0) == alone  # its last request ended after the heartbeat


def test_an_idle_decode_worker_has_a_limit():
    reader, own = worker("p", P, Reserved(prompt_tokens=500)), Reserved(prompt_tokens=200)
    for bound, expected in ((300, ("", "d")), (299, ("p", "d")), (0, ("p", "d"))):
        idle = worker("d", D, own, load=IDLE)
        assert choose(need(prompt=100), reader, idle, idle_decode=bound) == expected


def test_an_idle_decode_worker_does_not_help_lower_classes():
    reader, idle = worker("p", P, Reserved(prompt_tokens=300)), worker("d", D, load=IDLE)
    assert choose(need(prompt=100), reader, idle) == ("", "d")
    assert choose(replace(need(prompt=100), room=0.75), reader, idle) == ("p", "d")


SHORT_OR_NOT = pytest.mark.parametrize("handoff_min", [0, 500])


@SHORT_OR_NOT
@pytest.mark.parametrize("lost", [[], [worker("d", D, drain=True)], [worker("failed", D)]])
def test_a_prefill_worker_stands_in_for_lost_decode_workers(lost, handoff_min):
    what = need("r", 2, 100, 10, "failed")
    able = worker("p", P)

    def chosen(*workers):
        return choose(what, able, *workers, *lost, handoff_min=handoff_min)

    assert chosen() == ("", "p")
    assert chosen(worker("m", M)) == ("", "m")  # preferred
    assert chosen(worker("m", M, CROWDED)) == ("", "p")


@SHORT_OR_NOT
def test_nothing_stands_in_for_full_decode_workers(handoff_min):
    code, message = choose(need(), worker("p", P), worker("d", D, CROWDED), handoff_min=handoff_min)
    assert code == "FULL"
    assert ": all are full (d: " in message


def test_the_rejection_is_the_most_hopeful_one():
    large = need(prompt=900)
    small = {"max_model_len": 512}
    assert choose(large, worker("m", M, **small))[0] == "TOO_LARGE"
    assert choose(large, worker("m", M, CROWDED), worker("m2", M, **small))[0] == "FULL"
    assert choose(large, worker("p", P), worker("d", D, **small))[0] == "TOO_LARGE"
    assert choose(large, worker("p", P, CROWDED), worker("d", D, **small))[0] == "TOO_LARGE"
    assert choose(large, worker("p", P), worker("d", D, **small), worker("m", M, CROWDED))[0] == "FULL"
    assert choose(large, worker("m", M, drain=True))[0] == "NO_WORKERS"
    failed = need("r", 2, 100, 10, "m")
    assert choose(failed, worker("m", M)) == (
        "NO_WORKERS",
        "no worker can take the request: all that are ready failed an earlier attempt",
    )


def test_a_pair_must_have_compatible_kv():
    def message(there, here):
        code, found = choose(
            need(),
            worker("p", P, compatibility_hash="aa", facts=there),
            worker("d", D, compatibility_hash="bb", facts=here),
        )
        assert code == "NO_WORKERS"
        return found

    assert message({}, {}) == (
        "prefill worker p and decode worker d store KV differently (aa, bb): "
        "start them with the same engine settings"
    )
    plain, drafting = {"dtype": "float32"}, {"dtype": "float32", "speculative method": "mtp"}
    assert "(speculative method: none on prefill, mtp on decode)" in message(plain, drafting)


def test_a_pair_must_share_a_transport():
    code, message = choose(need(), worker("p", P, transports=["shm"]), worker("d", D, transports=["tcp"]))
    assert (code, "p and decode worker d share no transport (shm; tcp)" in message) == ("NO_WORKERS", True)


def test_scores_stay_within_bounds():
    over = Reserved(prompt_tokens=10**6, requests=10**4, blocks=10**4)
    for scorer in (QueuedPromptTokens(LIMITS), RunningRequests(LIMITS), FreeBlocks(LIMITS)):
        assert scorer.score(worker("w", M, over), need()) == 0.0
        free = scorer.score(worker("w", M), need())
        assert 0.9 <= free <= 1.0
        assert 0.0 <= scorer.score(worker("w", M, Reserved(500, 4, 50)), need()) < free


def test_free_blocks_include_look_ahead():
    scorer = FreeBlocks(LIMITS)
    plain = scorer.score(worker("w", D, lookahead_tokens=1), need(prompt=96, new=0))
    ahead = scorer.score(worker("w", D, lookahead_tokens=17), need(prompt=96, new=0))
    assert plain - ahead == pytest.approx(1 / 99)


def drawn(workers, what, times, seed=7, **config):
    policy = Policy(LIMITS, PolicySettings(**config), random.Random(seed))
    view = FleetView({one.worker_id: one for one in workers})
    choices = [policy.choose(view, what) for _ in range(times)]
    assert all(isinstance(one, WorkerChoice) for one in choices)
    return [one.decode.worker_id for one in choices]


@pytest.mark.parametrize("full", [0, 30, 300])
@pytest.mark.parametrize(("picker", "draws"), [("power_of_two", 2), ("power_of_four", 4)])
def test_the_best_of_a_few_random_workers_is_picked(full, picker, draws):
    mixed = [worker(f"w{number}", M, Reserved(blocks=80 - 8 * number)) for number in range(10)]
    others = [worker(f"full{number}", M, CROWDED) for number in range(full)]
    picks = drawn([*mixed, *others], need(), 800, picker=picker)
    counts = [picks.count(f"w{number}") for number in range(10)]
    assert sum(counts) == 800
    if full * draws <= 60:  # otherwise LOOKS workers may have fewer with room
        assert not any(counts[: draws - 1])  # the worst ones are never picked
        # The best one is picked whenever it is drawn.
        assert counts[9] == pytest.approx(800 * draws / 10, rel=0.2)
        assert counts[draws - 1] == pytest.approx(800 / comb(10, draws), rel=0.6, abs=10)
    assert drawn([*mixed, *others], need(), 50, picker=picker) == picks[:50]
    assert drawn(mixed[:1], need(), 1, picker=picker) == ["w0"]


def test_the_last_workers_with_room_are_also_drawn(monkeypatch):
    """If no drawn worker has room, workers are drawn from all that have."""
    monkeypatch.setattr(choose_module, "LOOKS", 1)
    free = [worker(f"d{at}", D, Reserved(requests=at)) for at in range(8)]
    full = [worker(f"full{at}", D, CROWDED) for at in range(200)]
    names = drawn([worker("p", P), *free, *full], need(), 400)
    assert {"d0", "d1", "d2"} <= set(names)
    assert names.count("d0") < 0.65 * len(names)


def test_best_breaks_ties_at_random():
    scored = [(worker("a", M), 0.5), (worker("b", M), 0.5), (worker("c", M), 0.1)]
    rng = random.Random(1)
    assert {Best(LIMITS).pick(scored, rng).worker_id for _ in range(50)} == {"a", "b"}


def test_names_are_checked():
    with pytest.raises(
        BadPolicy, match=r"^scheduler\.policy: there is no policy part 'prefix'; there are: best"
    ):
        Policy(LIMITS, PolicySettings(scorers={"prefix": 1.0}))
    with pytest.raises(BadPolicy, match="'best' is no Scorer, but a Picker"):
        Policy(LIMITS, PolicySettings(scorers={"best": 1.0}))
    with pytest.raises(BadPolicy, match="'free_blocks' is no Filter, but a Scorer"):
        Policy(LIMITS, PolicySettings(filters=["free_blocks"]))


def test_a_worker_with_staging_room_is_preferred():
    full, empty = (pb.WorkerLoad(pinned_bytes=pinned, staging_bytes=100) for pinned in (90, 0))
    pair = worker("a", P, load=full), worker("b", P, load=empty)
    assert choose(need(), *pair, worker("d", D)) == ("b", "d")
    assert choose(need(), *reversed(pair), worker("d", D)) == ("b", "d")
    scorer = StagingRoom(LIMITS)
    assert [scorer.score(one, need()) for one in pair] == [pytest.approx(0.1), 1.0]
    assert scorer.score(worker("not heard of", P), need()) == 1.0
    assert scorer.score(worker("without handoffs", P, load=pb.WorkerLoad()), need()) == 1.0


def test_weights_decide_between_scorers():
    few_requests = worker("few", D, Reserved(requests=1, blocks=80))
    many_blocks = worker("many", D, Reserved(requests=6, blocks=0))
    pair = (worker("p", P), few_requests, many_blocks)
    assert choose(need(), *pair, scorers={"running_requests": 9.0, "free_blocks": 1.0})[1] == "few"
    assert choose(need(), *pair, scorers={"running_requests": 1.0, "free_blocks": 9.0})[1] == "many"


def test_without_scorers_all_workers_are_equal():
    names = {choose(need(f"r{number}"), worker("a", M), worker("b", M), scorers={})[1] for number in range(3)}
    assert names <= {"a", "b"}


E = pb.ROLE_ENCODE
NO_KV = {"block_size": 0, "num_blocks": 0}


def test_an_encode_goes_to_an_encode_worker_and_nothing_else_does():
    encoder = worker("e", E, **NO_KV)
    others = [worker("p", P), worker("d", D), worker("m", M)]
    image = need(new=0, encode=True)
    assert choose(image, encoder, *others) == ("", "e")
    assert choose(image, *others) == ("NO_WORKERS", "no worker to encode is registered")
    code, message = choose(image, worker("e", E, CROWDED, **NO_KV), *others)
    assert (code, "no worker can encode" in message) == ("FULL", True)
    assert choose(need(new=0, prompt=1_024, encode=True), encoder) == ("", "e")
    assert choose(need(new=0, prompt=1_025, encode=True), encoder)[0] == "TOO_LARGE"


@pytest.mark.parametrize("prompt", [10, 100, 1_000])
def test_an_encode_worker_never_gets_a_prompt(prompt):
    """This holds whichever workers are missing, full or excluded."""
    random_ = random.Random(prompt)
    states = [None, Reserved(), CROWDED]
    for _ in range(300):
        roles = random_.choices([P, D, M], k=random_.randrange(4))
        workers = [worker(f"w{number}", role, random_.choice(states)) for number, role in enumerate(roles)]
        excluded = [one.worker_id for one in workers if random_.random() < 0.3]
        chosen = choose(need("r", 2, prompt, 10, *excluded), worker("e", E), *workers, handoff_min=100)
        assert "e" not in chosen


def test_images_are_spread_over_encode_workers():
    busy = worker("e1", E, Reserved(prompt_tokens=500, requests=1))
    assert choose(need(new=0, encode=True), busy, worker("e2", E)) == ("", "e2")
