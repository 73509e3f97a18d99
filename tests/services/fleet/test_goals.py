import pytest

from baton.autoscale.goals import Bounds
from baton.services.config import load
from baton.services.errors import ConfigError
from baton.services.fleet.goals import goals_of
from baton.services.fleet.supervisor import Fleet, _check, started
from harness.deployment import MODEL


def settings(**sections):
    return load(sections)


def test_milliseconds_become_seconds_and_numbers_bounds():
    goals = goals_of(
        settings(
            autoscale={"mode": "advise", "min_decode": 2, "max_decode": 7, "max_encode": 3},
            slo={"ttft_ms": 800, "itl_ms": 25},
        )
    )
    assert (goals.mode, goals.first_token_s, goals.gap_s) == ("advise", 0.8, 0.025)
    assert (goals.prefill, goals.decode, goals.encode) == (Bounds(1, 4), Bounds(2, 7), Bounds(0, 3))


def test_two_that_change_roles_exclude_each_other():
    balanced = {"rebalance_after_s": 5.0}
    with pytest.raises(ConfigError, match=r"autoscale\.mode is on and scheduler\.rebalance_after_s is set"):
        goals_of(settings(autoscale={"mode": "on"}, scheduler=balanced))
    assert goals_of(settings(autoscale={"mode": "advise"}, scheduler=balanced)).mode == "advise"


def test_sides_with_engines_of_their_own_do_not_rebalance():
    rebalanced = settings(
        engine={"model": str(MODEL)},
        scheduler={"rebalance_after_s": 5.0},
        fleet={"decode_engine": {"kv_cache_gib": 1.0}},
    )
    with pytest.raises(ConfigError, match=r"rebalance_after_s: leave out fleet\.prefill_engine"):
        _check(rebalanced, started(rebalanced, Fleet(1, 1, 0)))
