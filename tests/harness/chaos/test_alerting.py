import json

from bench import faults
from deploy.boards.alerts import ALERTS
from harness.chaos.alerting import GOAL_S, NAMED, UNHEARD, Heard, Quiet
from harness.chaos.faults import FAULTS
from harness.stats import saved


def test_each_fault_has_its_alert_or_a_reason():
    assert set(NAMED) | set(UNHEARD) == set(FAULTS)
    assert not set(NAMED) & set(UNHEARD)
    assert set(NAMED.values()) <= {alert.name for alert in ALERTS}


def test_each_fault_is_in_one_deployment():
    done = [name for group in faults.GROUPS for name in group.faults]
    assert sorted(done) == sorted(NAMED)
    for group in faults.GROUPS:
        assert bool(group.shape.redis) == any("redis" in name for name in group.faults)
        assert group.shape.proxied == ("drop-network" in group.faults)


def test_a_fault_measured_alone_leaves_the_others_their_figures(tmp_path):
    decode, redis = Heard("kill-decode", "W", 1.0, 9.0), Heard("kill-redis", "S", 2.0, 8.0)
    faults._save([decode, redis], Quiet(1800), tmp_path)
    faults._save([Heard("kill-redis", "S", 3.0, 7.0)], Quiet(20, {"BatonWorkerLost": 1}), tmp_path)
    kept = json.loads((tmp_path / "fault-catalogue.json").read_text())
    noticed = {one["fault"]: one["noticed_s"] for one in kept["faults"]}
    assert noticed == {"kill-decode": 1.0, "kill-redis": 3.0}
    assert kept["healthy"] == {"seconds": 1800, "alerts": {"BatonWorkerLost": 1}}


def test_alerts_come_in_time():
    assert Heard("kill-decode", "W", 5.0, 5.0 + GOAL_S).good
    assert not Heard("kill-decode", "W", 5.0, 5.1 + GOAL_S).good
    assert not Heard("kill-decode", "W", None, None).good
    assert all(one["good"] for one in saved(faults.RESULT)["faults"])


def test_the_page_is_up_to_date():
    assert faults.PAGE.read_text() == faults.page(), "run `python -m bench faults --page`"
