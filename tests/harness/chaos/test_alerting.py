from bench import faults
from deploy.boards.alerts import ALERTS
from harness.chaos.alerting import NAMED, UNHEARD
from harness.chaos.faults import FAULTS


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


def test_the_page_is_up_to_date():
    assert faults.PAGE.read_text() == faults.page(), "run `python -m bench faults --page`"
