"""Operators' commands against a real deployment: `baton doctor`, `baton log-level`."""

import asyncio
import re

import pytest

from baton.handoff import transports
from baton.services.config import load
from baton.services.diagnosis.doctor import examine
from baton.services.diagnosis.finding import Verdict
from harness.deployment import MODEL_NAME, idle
from harness.support import CALL_S, eventually


def settings_of(one):
    return load(config_file=str(one.config_file))


def examined(settings):
    async def all_of_it():
        return [one async for one in examine(settings)]

    return asyncio.run(all_of_it())


@pytest.mark.timeout(120)
def test_the_doctor_finds_a_whole_deployment_well(one_pair):
    found = examined(settings_of(one_pair))
    assert [one for one in found if one.verdict is Verdict.WRONG] == []
    prefill, decode = (one_pair.worker(role)["identity"]["worker_id"] for role in ("prefill", "decode"))
    handoffs = [one for one in found if one.area == "handoff"]
    assert {one.subject for one in handoffs} == {f"{prefill} -> {decode}"}
    measured = {one.what.partition(":")[0]: one.what for one in handoffs}
    assert set(measured) == set(transports.usable(None))
    for what in measured.values():
        speed, size = re.search(r": ([\d,]+) MB/s \(([\d.]+) MB in", what).groups()
        assert int(speed.replace(",", "")) > 1
        assert 1 < float(size) <= 16.8
    clocks = {one.subject: one.what for one in found if one.area == "clock"}
    assert set(clocks) == {"scheduler", prefill, decode}
    assert all(float(what.split()[0]) < 1000 for what in clocks.values())  # they share a clock
    versions = {one.subject: one.what for one in found if one.area == "versions"}
    assert versions["vllm"] == "0.32.0 on all 4 that have it"
    held = {one.subject: one.what for one in found if one.area == "ports"}
    assert f"process {one_pair.scheduler_process().pid} " in held["scheduler.address"]
    eventually(lambda: idle(one_pair), CALL_S, "the deployment is idle")


@pytest.mark.timeout(120)
def test_levels_change_without_a_restart(one_pair):
    """The scheduler changes at once, routers and workers with their next heartbeat."""
    logs = one_pair.folder / "logs"
    said = one_pair.baton("log-level", "all", "debug")
    assert said.returncode == 0, said.stderr
    decode = one_pair.worker("decode")["identity"]["worker_id"]
    assert decode in said.stdout

    def told(level):
        names = "scheduler", "router", *(path.stem for path in logs.glob("*-0.log"))
        texts = [(logs / f"{name}.log").read_text() for name in names]
        return len(texts) == 4 and all(f"the log level is {level} now" in text for text in texts)

    eventually(lambda: told("debug"), CALL_S, "all four log at debug")
    one_pair.client().completions.create(model=MODEL_NAME, prompt="The capital", max_tokens=4)
    # At debug the prefill worker logs the release of the request's KV.
    line = re.compile(r"DEBUG \[prefill-0\.\d+\] .* request_id=cmpl-\S+$", re.MULTILINE)
    prefill_log = logs / "prefill-0.log"
    eventually(lambda: line.search(prefill_log.read_text()), CALL_S, "the prefill worker logs the release")
    answered = re.compile(r"INFO \[router\] baton\.requests: request .*request_id=cmpl-")
    router_log = logs / "router.log"  # written after the response is sent
    eventually(lambda: answered.search(router_log.read_text()), CALL_S, "the router logs the request")

    assert one_pair.baton("log-level", "all", "info").returncode == 0
    eventually(lambda: told("info"), CALL_S, "all four are back")
    wrong = one_pair.baton("log-level", "nobody", "info")
    assert wrong.returncode == 1
    assert "'nobody' is no process here; there are: scheduler, router-" in wrong.stderr
    assert "use debug, info, warning, error" in one_pair.baton("log-level", "all", "chatty").stderr
