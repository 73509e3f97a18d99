"""The section on the simulator's error, whose result is measured on an idle machine alone."""

from __future__ import annotations

from bench.report_simulate import SECTIONS
from harness.simulate.validate import errors


def test_the_error_is_told_by_policy() -> None:
    real = {"ttft_mean_ms": 100.0, "ttft_p50_ms": 80.0, "ttft_p90_ms": 200.0}
    real |= {"computed_tokens": 20_000, "computed_share": 0.25, "requests": 100}
    predicted = {**real, "ttft_mean_ms": 92.0, "computed_tokens": 21_000}
    arm = {"real": real, "simulated": predicted, "error_percent": errors(real, predicted)}
    result = {
        "machine": {"cores": 2, "cpu": "some", "when": "2026-01-01"},
        "rate": 2.0,
        "seconds": 60.0,
        "profile": "one, a core",
        "arms": {"Baton": arm},
    }
    text = "\n".join(map(str, SECTIONS["simulate-validation"](result)))
    assert "| Baton | ttft_mean_ms | 100 | 92 | -8.0 % |" in text
    assert "| Baton | computed_tokens | 20,000 | 21,000 | +5.0 % |" in text
    assert "| Baton | computed_share | 0.250 | 0.250 | +0.0 % |" in text
