import pytest

from bench import gpu
from bench.gpu import Engine, Site


@pytest.fixture
def site():
    made = Site("cpu", layers=2, tokens=256)
    yield made
    made.close()


def test_the_timed_bytes_are_compared(site, monkeypatch):
    found = gpu.handoffs(site)
    assert found["blocks"] == 16
    assert found["mib"] == 2  # 16 blocks of 16 tokens, 2 layers, 8 heads of K and V of 128, bfloat16
    assert 0 < found["engine_thread_ms"] <= found["save_ms"]
    other = Site("cpu", layers=2, tokens=256)
    monkeypatch.setattr(Site, "load", lambda *_: 0.0)  # loads nothing
    with pytest.raises(AssertionError, match="differ from the saved ones"):
        gpu.handoffs(other)
    other.close()


def test_steps_are_timed_beside_handoffs(site, monkeypatch):
    monkeypatch.setattr(gpu, "STEP_S", 0.001)
    monkeypatch.setattr(gpu, "STEPS", 10)
    found = gpu.beside(site, Engine(site.on, 64))
    assert set(found) == {"alone", "beside saves", "beside loads", "beside both"}
    assert found["alone"]["times_alone"] == 1.0
    assert all(arm["p99_ms"] >= arm["p50_ms"] > 0 for arm in found.values())
