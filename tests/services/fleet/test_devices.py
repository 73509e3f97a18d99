"""Shares of a machine: whole GPUs, as many as each worker needs."""

from __future__ import annotations

import pytest

from baton.services.config import Settings
from baton.services.errors import StartError
from baton.services.fleet import devices
from baton.services.fleet.places import Plan, places_of


@pytest.fixture(autouse=True)
def _six_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")


def test_each_worker_gets_the_gpus_that_it_needs() -> None:
    shares = devices.assign([2, 1, 2])
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in shares] == ["0,1", "2", "3,4"]
    with pytest.raises(
        StartError, match=r"2 workers of 2 GPU.s. and 3 workers of 1 GPU.s. need 7 GPUs, 6 are"
    ):
        devices.assign([2, 2, 1, 1, 1])


def test_further_places_leave_the_first_workers_of_others_theirs() -> None:
    chosen = Settings(autoscale={"mode": "on", "max_prefill": 3, "max_decode": 3})  # type: ignore[arg-type]
    wide = Settings(engine={"tensor_parallel_size": 2})  # type: ignore[arg-type]
    plans = [Plan(chosen, ["prefill", "decode"], "a-"), Plan(wide, ["mixed"], "b-")]
    first, second = places_of(plans, lambda _: lambda *_: lambda: None)
    assert first.names == ["a-prefill-0", "a-decode-0", "a-worker-2", "a-worker-3"]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in second._devices.values()] == ["4,5"]
