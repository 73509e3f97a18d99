import pytest

from baton.autoscale.goals import Bounds
from baton.services.config import load
from baton.services.errors import ConfigError
from baton.services.fleet.goals import goals_of
from baton.services.fleet.supervisor import Fleet, _check, _peers, scheduler_addresses, started
from harness.deployment import MODEL


@pytest.mark.parametrize(
    ("given", "number", "listens"),
    [
        ("127.0.0.1:7400", 1, ["127.0.0.1:7400"]),
        ("[::1]:7400", 3, ["[::1]:7400", "[::1]:7401", "[::1]:7402"]),
        ("127.0.0.1:7400, 127.0.0.1:7500", 2, ["127.0.0.1:7400", "127.0.0.1:7500"]),
    ],
)
def test_schedulers_listen_on_the_configured_ports_or_the_next_ones(given, number, listens):
    assert scheduler_addresses(load({"scheduler": {"address": given}}), number) == listens


def test_other_numbers_of_addresses_than_schedulers_are_refused():
    settings = load({"scheduler": {"address": "a:1,b:2"}})
    for number in (1, 3):
        with pytest.raises(ConfigError, match=f"names 2 schedulers and --schedulers is {number}"):
            scheduler_addresses(settings, number)


@pytest.mark.parametrize(("nodes", "enabled"), [(1, False), (2, True)])
def test_mixed_workers_hand_over_where_baton_node_runs_the_rest_of_their_gang(nodes, enabled):
    """`baton node` has handoffs on, and the members of a gang must agree."""
    (one,) = started(load({"engine": {"nodes": nodes}}), Fleet(0, 0, 1))
    assert _peers(one).settings.handoff.enabled is enabled


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"worker": {"gang": "east"}},
            r"^engine\.nodes .* with worker\.gang \(value 'east'\): .*`baton node`",
        ),
        (
            {"models": {"one": {"workers": {"mixed": 1}}}},
            r"^models\.one: engine\.nodes is above 1 with several models: .*`baton node`",
        ),
        ({"autoscale": {"mode": "on"}}, r"^engine\.nodes is above 1, and the other machines get no orders"),
    ],
)
def test_gangs_that_would_not_form(more, why):
    engine = {"model": str(MODEL), "nodes": 2, "tensor_parallel_size": 2}
    settings = load({"engine": engine, "security": {"plain_ranks": True}} | more)
    fleet = None if "models" in more else Fleet(1, 1, 0)
    with pytest.raises(ConfigError, match=why):
        _check(settings, started(settings, fleet))


def test_milliseconds_become_seconds_and_numbers_bounds():
    autoscale = {"mode": "advise", "decode": "2-7", "encode": "0-3"}
    goals = goals_of(load({"autoscale": autoscale, "slo": {"ttft_ms": 800, "itl_ms": 25}}))
    assert (goals.mode, goals.first_token_s, goals.gap_s) == ("advise", 0.8, 0.025)
    assert (goals.prefill, goals.decode, goals.encode) == (Bounds(1, 4), Bounds(2, 7), Bounds(0, 3))


def test_sides_with_engines_of_their_own_do_not_rebalance():
    fleet = {"engines": {"decode": {"kv_cache_gib": 1.0}}}
    rebalanced = load({"engine": {"model": str(MODEL)}, "autoscale": {"mode": "roles"}, "fleet": fleet})
    with pytest.raises(ConfigError, match=r"autoscale\.mode is roles: leave out fleet\.engines"):
        _check(rebalanced, started(rebalanced, Fleet(1, 1, 0)))
