import statistics
from dataclasses import replace

from baton.autoscale.capacity import Gap
from baton.autoscale.controller import START_S, Controller
from baton.autoscale.goals import Bounds, Goals
from baton.autoscale.histogram import TOKENS, Histogram
from baton.autoscale.orders import OTHER, Draft
from baton.autoscale.seen import Member, Seen
from baton.autoscale.sizing import Counts
from baton.protos import scheduler_pb2 as pb
from tests.autoscale.simulation import Phase, Service, Simulation, requests_of

P, D, E = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_ENCODE
GOALS = Goals("on", 1.0, 0.05, Bounds(1, 6), Bounds(1, 6), 2.0, 60.0, 10.0)
SERVICE = Service(2_000.0, Gap(0.01, 0.001), 32)


def member(name, role, requests=0, **changes):
    states = {"ready": True, "leaving": False, "flips": True} | changes
    return Member(name, name, role, *states.values(), pb.WorkerLoad(), 0, requests, 32)


def places(names, **roles):
    allowed = {name: [role] for name, role in roles.items()}
    return {"fleet": [pb.Place(name=name, roles=allowed.get(name, [])) for name in names]}


def drafted(members, names=(), plan=None, **roles):
    return Draft(Seen(0.0, members, places=places(names, **roles) if names else {}, plan=plan or {}))


PAIR = [member("p", P), member("d", D)]


def test_running_workers_of_a_new_fleet_count_as_ordered():
    draft = drafted([*PAIR, member("other", D)], "pdx")
    assert draft.plan == {"fleet": {"p": P, "d": D}}
    assert [place.name for _, place in draft.empty(OTHER)] == ["x"]
    assert draft.present() == Counts(1, 2)


def test_an_ordered_worker_counts_before_it_runs():
    draft = drafted(PAIR, "pdx", {"fleet": {"p": P, "d": D, "x": D}})
    assert draft.present() == Counts(1, 2)
    draft.stop(D, 1, Bounds(1, 6))  # it is stopped first
    assert draft.plan == {"fleet": {"p": P, "d": D}}
    assert not draft.stops


def test_the_plan_follows_changes_of_roles():
    draft = drafted([member("p", D), member("d", D)], "pd", {"fleet": {"p": P, "d": D}})
    assert draft.plan == {"fleet": {"p": D, "d": D}}


def test_the_idlest_worker_changes_its_role_and_one_stays():
    busy, idle = member("d1", D, 5), member("d2", D, 1)
    draft = drafted([member("p", P), busy, idle], ["d1", "d2"])
    draft.flip(P, 5, {})
    assert [(one.worker_id, role) for one, role in draft.flips] == [("d2", P)]
    assert (draft.plan["fleet"], draft.present()) == ({"d1": D, "d2": P}, Counts(2, 1))
    draft = drafted([busy, member("d2", D, flips=False), member("d3", D)])
    draft.flip(P, 1, {"d3": 0.0})  # it has just changed
    assert [one.worker_id for one, _ in draft.flips] == ["d1"]


def test_a_place_may_be_for_one_role():
    decodes = [member("d1", D, 3), member("d2", D), member("d3", D, 9)]
    draft = drafted(decodes, ["d1", "d2", "x", "y"], d2=D, x=D)
    draft.flip(P, 1, {})
    assert [one.worker_id for one, _ in draft.flips] == ["d1"]
    draft.start(P, 2)
    assert (draft.starts, draft.present()) == ([("y", P)], Counts(2, 2))


def test_only_workers_of_fleets_are_stopped_and_never_the_last():
    by_hand = [member("h1", D), member("h2", D)]
    draft = drafted([*by_hand, member("d1", D, 9), member("d2", D, 1)], ["d1", "d2"])
    draft.stop(D, 4, Bounds(1, 6))
    assert [one.worker_id for one in draft.stops] == ["d2", "d1"]
    draft = drafted([member("d1", D), member("d2", D, ready=False)], ["d1", "d2"])
    draft.stop(D, 4, Bounds(1, 6))
    assert not draft.stops


def test_the_last_idle_worker_by_name_is_stopped():
    idle = [member("decode-0", D), member("worker-2", D), member("worker-3", D), member("prefill-0", P)]
    draft = drafted(idle, [one.name for one in idle])
    draft.stop(D, 2, Bounds(1, 6))
    assert [one.worker_id for one in draft.stops] == ["worker-3", "worker-2"]


def test_a_stopped_worker_no_longer_counts_although_it_is_ready():
    """If it counted, a second worker would be stopped as well."""
    draft = drafted([member("d1", D, 1), member("d2", D, 0)], ["d1", "d2", "x"])
    draft.stop(D, 1, Bounds(1, 6))
    assert [one.worker_id for one in draft.stops] == ["d2"]
    draft = drafted([member("d1", D, 0), member("d2", D, 1)], ["d1", "d2", "x"], draft.plan)
    assert draft.present() == Counts(0, 1)
    draft.stop(D, 1, Bounds(1, 6))
    draft.flip(P, 1, {})
    assert not draft.stops
    assert not draft.flips
    assert draft.plan == {"fleet": {"d1": D}}


def test_new_workers_go_to_the_emptiest_fleet():
    two = {"a": [pb.Place(name="a0"), pb.Place(name="a1")], "b": [pb.Place(name="b0"), pb.Place(name="b1")]}
    draft = Draft(Seen(0.0, [member("a0", D)], places=two))
    draft.start(D, 1)
    assert draft.starts == [("b0", D)]


class Steps:
    """A controller's steps, whose orders are carried out only if the test does so."""

    def __init__(self, members, names, own_goals=GOALS, **roles):
        self.controller = Controller(own_goals)
        self.members = members
        self.places = places(names, **roles)
        self.plan = {}
        self.now = 0.0

    def step(self, load=None):
        self.now += GOALS.interval_s
        decision = self.controller.step(
            Seen(self.now, self.members, {"r": load or pb.RouterLoad()}, self.places, self.plan)
        )
        self.plan = {key: dict(value) for key, value in decision.plan.items()}
        return decision


def test_nothing_is_stopped_while_nothing_is_known():
    one = Steps([*PAIR, member("e", D)], "pde")
    assert not any(one.step().stops for _ in range(60))


def test_a_worker_that_never_registers_is_given_up():
    one = Steps(PAIR, "pdx")
    one.plan = {"fleet": {"p": P, "d": D, "x": D}}
    assert one.step().present == Counts(1, 2)
    one.now = START_S + 3
    decision = one.step()
    assert decision.changed
    assert (decision.plan, decision.present) == ({"fleet": {"p": P, "d": D}}, Counts(1, 1))
    draft = Draft(Seen(one.now, PAIR, places=one.places, plan=one.plan), barred={"x"})
    assert not draft.empty(OTHER)


def test_advice_is_not_limited_by_places():
    phases = [Phase(60, 12.0, 800, 20)]
    run = {}
    for mode in ("advise", "on"):
        controller = Controller(goals(mode=mode))
        Simulation(requests_of(phases, 1), SERVICE, (1, 1), controller)
        run[mode] = max(counts.prefill for _, counts in controller._history)
    assert run["advise"] > run["on"] == 1


class Encoding(Steps):
    """1P1D without load, and places for encode workers. An image has 1,000 tokens and takes 0.1 s."""

    def __init__(self, most=4):
        there = [*"pdx", *(f"e{at}" for at in range(most))]
        super().__init__(PAIR, there, goals(encode=Bounds(0, most)), e0=E, e1=E, e2=E, e3=E)
        self.counts = {}  # the encode workers' loads, keyed by place
        self.load = pb.RouterLoad()
        self.images = Histogram(TOKENS)
        self.queued = 0.0  # s of work

    def run(self, seconds, per_s):
        """Let images arrive for some time; return the places that have encode workers."""
        step_s = GOALS.interval_s
        for _ in range(round(seconds / step_s)):
            for _ in range(round(per_s * step_s)):
                self.images.add(1_000)
                self.load.image_tokens += 1_000
            self.queued += 0.1 * per_s * step_s if self.counts else 0.0  # else the prefill worker encodes
            for one in self.counts.values():
                busy_s = min(step_s, self.queued / len(self.counts))
                one.counts.busy_s += busy_s
                one.counts.computed_tokens += round(10_000 * busy_s)
            self.queued = max(0.0, self.queued - step_s * len(self.counts))
            each = round(10_000 * self.queued / max(1, len(self.counts)))
            encoders = [replace(member(name, E), queued_tokens=each) for name in self.counts]
            for one in encoders:
                one.load.CopyFrom(self.counts[one.name])
            self.members = [*PAIR, *encoders]
            self.step(pb.RouterLoad(images=self.images.counts, image_tokens=self.load.image_tokens))
            ordered = [name for name, role in self.plan["fleet"].items() if role == E]
            self.counts = {name: self.counts.get(name, pb.WorkerLoad()) for name in ordered}
        assert {name for name, role in self.plan["fleet"].items() if role != E} == {"p", "d"}
        return sorted(self.counts)


def test_encode_workers_come_and_go_with_the_images():
    one = Encoding()
    assert (one.run(60, 0.0), one.run(4, 5.0), one.run(60, 5.0)) == ([], ["e0"], ["e0"])
    assert one.run(60, 20.0) == ["e0", "e1", "e2"]
    assert one.run(40, 0.0) == ["e0", "e1", "e2"]  # stopped late
    assert (one.run(120, 0.0), one.run(10, 5.0)) == ([], ["e0"])


def test_encode_workers_stay_without_a_maximum():
    one = Encoding(most=0)
    one.counts = {"by hand": pb.WorkerLoad()}
    assert one.run(4, 20.0) == []
    decision = one.controller.step(Seen(one.now, [*PAIR, member("h", E)], places=one.places, plan=one.plan))
    assert decision.wanted.encode == 1
    assert not decision.stops


def test_a_place_takes_encode_workers_only_if_it_says_so():
    draft = drafted([*PAIR, member("e", E)], "pdxe", e=E)
    draft.start(E, 1)
    assert not draft.starts
    draft.stop(E, 1, Bounds(0, 2))  # even the last one
    assert [one.worker_id for one in draft.stops] == ["e"]
    draft = drafted(PAIR, "pdxe", e=E)
    assert [place.name for _, place in draft.empty(OTHER)] == ["x"]
    draft.start(P, 3)
    draft.start(E, 3)
    assert draft.starts == [("x", P), ("e", E)]


def goals(**changes):
    values = {name: getattr(GOALS, name) for name in Goals.__slots__} | changes
    return Goals(**values)


def test_workers_follow_the_load():
    phases = [Phase(120, 3.0, 400, 80), Phase(120, 9.0, 400, 80), Phase(180, 3.0, 400, 80)]
    run = Simulation(requests_of(phases, 1), SERVICE, (1, 1), Controller(GOALS), places=10, start_s=5.0)
    there = {at: sum(counts) for at, counts in run.counts.items()}
    assert there[110] < there[230] > there[410]
    assert there[250] == there[230]  # stopped late
    assert run.within > 0.97


def test_another_mix_of_load_changes_roles():
    phases = [Phase(150, 5.0, 1_000, 16), Phase(150, 5.0, 64, 400)]
    run = Simulation(requests_of(phases, 1), SERVICE, (4, 2), Controller(GOALS), places=6, start_s=5.0)
    assert run.orders["flip"] >= 1
    assert run.counts[140][0] > run.counts[290][0]
    assert run.counts[140][1] < run.counts[290][1]


def test_steady_load_changes_little():
    steady = requests_of([Phase(600, 5.0, 400, 100)], 3)
    run = Simulation(steady, SERVICE, (2, 2), Controller(GOALS), places=8, start_s=5.0)
    late = {counts for at, counts in run.counts.items() if at > 120}
    assert sum(run.orders.values()) <= 8
    assert len(late) <= 3
    assert run.within > 0.98


def test_predictions_are_accurate_under_steady_load():
    steady = requests_of([Phase(400, 5.0, 400, 100)], 4)
    run = Simulation(steady, SERVICE, (2, 2), Controller(goals(mode="advise")), places=8, start_s=5.0)
    assert set(run.errors) == {
        *("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s"),
        *("first_token_within", "gap_within"),
    }
    assert statistics.median(run.errors["requests_per_s"]) < 20
    assert statistics.median(run.errors["first_token_within"]) < 5
    assert statistics.median(run.errors["gap_within"]) < 5
