import argparse
import os

import pytest

from bench.scheduler import Arm, arms, measure
from harness.support import ROOT


def test_each_arm_differs_from_the_first_in_one_thing():
    options = argparse.Namespace(
        stores=["redis", "memory"], routers=[1, 20, 100], pairs=[32, 500], schedulers=[2]
    )
    found = arms(options)
    assert found[0] == Arm()
    assert [sum(vars(one)[key] != vars(Arm())[key] for key in vars(one)) for one in found] == [0] + [1] * 5
    assert str(found[-1]) == "redis, 20 routers, 2 schedulers, 32P32D"


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: starts eight processes")
@pytest.mark.timeout(240)
def test_two_schedulers_place_while_redis_hangs():
    figures = measure(Arm("stopped", routers=3, pairs=2, schedulers=2), ROOT, 30.0, 2.0)
    assert figures["failed"] == figures["fast_failed"] == 0
    assert 10 < figures["placed_per_s"] < 60
    assert figures["fast_placed_per_s"] > figures["placed_per_s"]
    assert 0 < figures["own_p50_ms"] <= figures["place_p50_ms"] <= figures["place_p99_ms"]
    assert figures["fast_cpu_us"] > 0
