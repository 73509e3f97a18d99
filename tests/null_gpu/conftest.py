"""The two deployments of the tests on the null GPU, and a table of their arms at the end."""

import sys

import pytest

from tests.null_gpu.arms import HEAD, V1, V2, tried

_done = []

if "harness.null_gpu.hooks" not in sys.modules:
    raise pytest.UsageError("these tests need the null GPU's environment: make null-gpu")


@pytest.fixture(scope="session")
def on_v2(tmp_path_factory):
    _done.append(tried(tmp_path_factory.mktemp("runners") / "v2", V2))
    return _done[-1]


@pytest.fixture(scope="session")
def on_v1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runners") / "v1"
    _done.append(tried(folder, V1, VLLM_USE_V2_MODEL_RUNNER="0"))
    return _done[-1]


def pytest_terminal_summary(terminalreporter):
    if _done:
        terminalreporter.section("arms on the null GPU")
        terminalreporter.line(HEAD)
    for one in _done:
        for name, report in one.reports.items():
            terminalreporter.line(report.row(name))
        for name, why in one.failed.items():
            terminalreporter.line(f"{name:<14}did not start: {why.strip()[-200:]}")
