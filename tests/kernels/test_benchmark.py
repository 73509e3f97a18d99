"""The kernels' benchmark reports no wrong kernels, and calls the alternatives rightly."""

import json

import pytest
import torch

from bench import kernels, kernels_verify
from bench.kernels import Case
from harness import stats


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Redirect results to a folder that already has those of another operation."""
    monkeypatch.setattr(stats, "RESULTS", tmp_path)
    monkeypatch.setitem(kernels.BUFFER, "cpu", 1 << 16)
    path = tmp_path / "kernels-cpu.json"
    path.write_text(json.dumps({"operations": {"kv_pack": "measured before"}}))
    return path


def test_nothing_is_reported_if_a_check_fails(results, monkeypatch, capsys):
    def fail(device):
        raise AssertionError("one token is another")

    monkeypatch.setattr(kernels_verify, "check", fail)
    with pytest.raises(SystemExit, match="wrong on cpu: verify"):
        kernels.main(["--only", "verify", "--device", "cpu"])
    assert "one token is another" in capsys.readouterr().err
    assert json.loads(results.read_text())["operations"] == {"kv_pack": "measured before"}


def test_results_are_printed_and_stored(results, monkeypatch, capsys):
    work = torch.ones(1 << 16)
    case = Case("sum", {"numbers": 1 << 16}, 4 << 16, work.sum, {"twice": lambda: (work.sum(), work.sum())})
    monkeypatch.setattr(kernels_verify, "check", lambda _: None)
    monkeypatch.setattr(kernels_verify, "cases", lambda _: [case])
    kernels.main(["--only", "verify", "--device", "cpu"])
    assert "twice" in capsys.readouterr().out
    found = json.loads(results.read_text())["operations"]
    assert found["kv_pack"] == "measured before"
    row = found["verify"]["cases"][0]
    assert row["us"] > 0
    # All three are rounded, to tenths, hundredths and thousandths; a busy machine copies a few tenths of a
    # GB/s.
    copy = found["verify"]["copy_gb_s"]
    assert row["of_copy"] <= (row["gb_s"] + 0.005) / max(copy - 0.05, 1e-9) + 0.001
    assert row["of_copy"] >= (row["gb_s"] - 0.005) / (copy + 0.05) - 0.001


@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")  # vLLM's interpreted kernels raise it
def test_vllms_samplers_accept_certain_drafts(device):
    step = kernels_verify._certain(device)
    first, second = kernels_verify._v1(), kernels_verify._v2()
    if first is None or second is None:
        pytest.skip("vLLM's files are missing")
    wanted = [[*drafts, 5] for drafts in step.tokens.view(step.batch, -1).tolist()]
    assert kernels_verify.vllm_v1(step, first).tolist() == wanted
    ends = torch.cat([step.ends.new_zeros(1), step.ends])
    for block in (False, True):
        tokens, _ = kernels_verify.vllm_v2(step, second, ends, block)
        assert tokens.tolist() == wanted
