from functools import partial

import pytest

from baton.services.cli.node import _ordered
from baton.services.config import Settings, load
from baton.services.errors import ConfigError, StartError
from baton.services.fleet import devices
from baton.services.fleet.places import Plan, places_of
from baton.services.fleet.supervisor import Fleet


@pytest.fixture(autouse=True)
def _six_gpus(monkeypatch):
    monkeypatch.setattr(devices, "cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")


def settings(gpus, **engine):
    fleet = {"devices": gpus} if gpus else {}
    return Settings(engine=engine, fleet=fleet)


def seen(shares):
    return [one.environment["CUDA_VISIBLE_DEVICES"] for one in shares]


def placed(plans, gpus=None):
    return places_of(plans, lambda _: lambda _name, _role, where: partial(print, where), gpus)


def seen_in(places):
    runs = [run for members in places._runs.values() for run in members.values()]
    return seen(run.args[0] for run in runs)


def test_each_worker_gets_the_gpus_that_it_needs():
    assert seen(devices.assign([2, 1, 2])) == ["0,1", "2", "3,4"]
    said = r"2 workers of 2 GPU.s. and 3 workers of 1 GPU.s. need 7 GPUs, 6 are"
    with pytest.raises(StartError, match=said):
        devices.assign([2, 2, 1, 1, 1])


def test_further_places_leave_the_first_workers_of_others_theirs():
    chosen = Settings(autoscale={"mode": "on", "prefill": "1-3", "decode": "1-3"})
    wide = Settings(engine={"tensor_parallel_size": 2})
    plans = [Plan(chosen, ["prefill", "decode"], "a-"), Plan(wide, ["mixed"], "b-")]
    first, second = placed(plans)
    assert first.names == ["a-prefill-0", "a-decode-0", "a-worker-2", "a-worker-3"]
    assert seen_in(second) == ["4,5"]


def test_workers_share_the_gpus_that_are_named_twice(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1, GPU-8f6c")
    plans = [
        Plan(settings([0, 0, 1, "GPU-8f6c", 1], kv_cache_gib=8), ["prefill", "decode"], "a-"),
        Plan(settings([], kv_cache_gib=8), ["mixed"] * 3, "b-"),
    ]
    first, second = placed(plans, plans[0].settings.fleet.devices)
    assert (seen_in(first), seen_in(second)) == (["0", "0"], ["1", "GPU-8f6c", "1"])


def test_a_wide_worker_shares_each_of_its_gpus():
    assert seen(devices.assign([2, 2], ["0", "1", "0", "1"])) == ["0,1", "0,1"]
    with pytest.raises(ConfigError, match=r"fleet.devices \(0,0,1,1\): .*GPU 0 twice.* as 0,1,0,1"):
        devices.assign([2, 2], ["0", "0", "1", "1"])


def test_who_shares_a_gpu_must_say_how_much_of_it():
    """vLLM would give nine tenths of it to the first worker, and refuse the second."""
    lone = settings([0, 1, 1], kv_cache_gib=8)
    sharing = settings([])
    plans = [Plan(lone, ["mixed"], "a-"), Plan(sharing, ["prefill", "decode"], "b-")]
    with pytest.raises(ConfigError, match=r"fleet.devices: 2 workers share GPU 1.* set engine.kv_cache_gib"):
        placed(plans, lone.fleet.devices)
    sharing.engine.extra = {"kv_cache_memory_bytes": 1 << 30}
    placed(plans, lone.fleet.devices)


def test_a_node_shares_gpus_as_a_deployment_does():
    orders = _ordered(settings([5, 5], kv_cache_gib=8), Fleet(1, 1, 0))
    assert [one.environment for one in orders] == [{"CUDA_VISIBLE_DEVICES": "5"}] * 2
    with pytest.raises(ConfigError, match=r"set engine.kv_cache_gib"):
        _ordered(settings([5, 5]), Fleet(1, 1, 0))
    with pytest.raises(StartError, match=r"2 workers of 1 GPU.s. need 2 GPUs, fleet.devices names 1"):
        _ordered(settings([5]), Fleet(1, 1, 0))


def test_a_node_runs_all_workers_of_a_gang():
    own = settings([], tensor_parallel_size=2)
    own.fleet.engines = {"decode": {"data_parallel_size": 2}}
    orders = _ordered(own, Fleet(1, 1, 0))
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in orders] == ["0,1", "2,3", "4,5"]
    assert [one.name.rpartition("-")[2] for one in orders] == ["0", "0.r0", "0.r1"]
    gangs = {(one.tree.worker.gang_name, one.tree.worker.gang_rank) for one in orders[1:]}
    place = orders[1].name.removesuffix(".r0")
    assert gangs == {(place, 0), (place, 1)}


def test_a_further_machine_needs_workers_that_span_machines():
    with pytest.raises(ConfigError, match=r"^fleet\.node_rank \(value 1\): .* set engine\.nodes"):
        _ordered(load({"fleet": {"node_rank": 1}}), Fleet(0, 0, 1))


def test_further_places_are_as_many_as_the_settings_name():
    chosen = settings([0, 0, 0], kv_cache_gib=8)
    chosen.autoscale.mode = "on"
    (only,) = placed([Plan(chosen, ["prefill", "decode"])], chosen.fleet.devices)
    assert seen_in(only) == ["0", "0", "0"]


def test_a_gpu_that_is_hidden_cannot_be_named():
    with pytest.raises(ConfigError, match=r"GPU 7.*CUDA_VISIBLE_DEVICES \(0,1,2,3,4,5\)"):
        devices.assign([1], ["7"])


def test_a_variable_that_names_a_gpu_twice_is_refused(monkeypatch):
    """CUDA would then see no GPU in other processes, and their imports would fail."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    for work in (lambda: devices.assign([1, 1]), lambda: devices.assign([1], ["0"])):
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES \(0,0\).* fleet.devices to 0,0"):
            work()


def test_there_are_no_gpus_to_share_on_a_cpu(monkeypatch):
    monkeypatch.setattr(devices, "cpu_build", lambda: True)
    with pytest.raises(ConfigError, match=r"fleet.devices: .*CPU.* leave it out"):
        devices.assign([1], ["0"])
