import pytest

from baton import machine
from baton.protos import scheduler_pb2 as pb
from baton.services.config import load
from baton.services.diagnosis.finding import Verdict
from baton.services.diagnosis.machine import Needs, judge

GIB = 1 << 30


def seen(**changes):
    shm = {"shm_bytes": 8 * GIB, "shm_free": 8 * GIB, "shm_writable": True}
    more = {"files_soft": 1024, "files_hard": 1 << 20, "memory_bytes": 32 * GIB, "memory_free": 16 * GIB}
    cpu = {"cores": 8, "cpu": "a CPU", "cpu_features": ["avx2", "avx512f"]}
    return pb.Machine(**(shm | more | cpu | changes))


def found(area, needs=None, torch="2.13.0+cpu", **changes):
    (one,) = [one for one in judge("m", seen(**changes), torch, needs or Needs()) if one.area == area]
    return one


@pytest.mark.parametrize(
    ("area", "changes", "verdict", "says"),
    [
        ("shared memory", {}, Verdict.OK, "8.0 GiB free"),
        ("shared memory", {"shm_bytes": 0}, Verdict.WRONG, "there is no /dev/shm"),
        ("shared memory", {"shm_writable": False}, Verdict.WRONG, "cannot be written"),
        ("shared memory", {"shm_bytes": 64 << 20, "shm_free": 64 << 20}, Verdict.WARNING, "container"),
        ("file descriptors", {"files_soft": 256}, Verdict.WARNING, "the limit is 256"),
        ("file descriptors", {"files_soft": (1 << 63) - 1}, Verdict.OK, "the limit is none"),
        ("memory", {"memory_free": GIB // 2}, Verdict.WARNING, "512 MiB free"),
        ("CPU", {"cpu_features": ["avx2"]}, Verdict.WARNING, "without AVX-512"),
        ("CPU", {"cpu_features": ["avx512f", "amx_tile"]}, Verdict.WARNING, "does not let"),
        ("CPU", {"cpu_features": ["avx512f", "amx_tile"], "amx_permitted": True}, Verdict.OK, "amx_tile"),
        ("GPU", {"gpus": ["NVIDIA H100, 80 GiB"]}, Verdict.WARNING, "torch 2.13.0+cpu uses none"),
        ("GPU", {"gpus": ["nvidia-smi fails: 9"]}, Verdict.WRONG, "fails"),
    ],
)
def test_each_fact_has_its_verdict(area, changes, verdict, says):
    one = found(area, **changes)
    assert (one.verdict, says in one.what) == (verdict, True), one
    assert bool(one.todo) is (verdict is not Verdict.OK)  # all but OK have advice


def test_the_configuration_says_how_much_is_enough():
    engine = {"kv_cache_gib": 12, "tensor_parallel_size": 2}
    settings = load({"handoff": {"staging_mib": 4096}, "engine": engine})
    needs = Needs.of_worker(settings, 6 * GIB)
    assert needs.shm == 8 * GIB  # 4 GiB for each of two ranks
    assert found("shared memory", needs).verdict is Verdict.OK
    assert found("shared memory", needs, shm_free=7 * GIB).verdict is Verdict.WRONG
    assert found("memory", needs).verdict is Verdict.WARNING  # 12 + 6 of 16
    assert found("memory", needs, memory_free=20 * GIB).verdict is Verdict.OK
    without = Needs.of_worker(load({"handoff": {"transports": ["tcp"]}}), 0)
    assert found("shared memory", without, shm_bytes=0).verdict is Verdict.OK


def test_routers_need_descriptors_for_their_clients():
    needs = Needs.of_router()
    assert found("file descriptors", needs, files_hard=4096).verdict is Verdict.WARNING
    assert found("file descriptors", needs, files_soft=64, files_hard=8192).verdict is Verdict.OK


def test_this_machine_can_be_looked_at():
    here = machine.inspection()
    assert here.versions["vllm"] == "0.32.0"
    assert here.machine.shm_bytes >= here.machine.shm_free > 0
    assert here.machine.memory_bytes > here.machine.memory_free > 0
    assert here.machine.cores >= 1
