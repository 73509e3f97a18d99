import asyncio
import threading

import pytest

from baton import rpc
from baton.scheduler.service import SchedulerServer
from baton.security import identity
from baton.security.authority import Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role
from baton.services.config import load
from baton.services.diagnosis import certificates
from baton.services.diagnosis.finding import Verdict
from harness.scheduling import Options

TOPIC = "test"


def act(folder, authority, role):
    identity.write(folder, authority.issue(Name(TOPIC, role)))
    rpc.act_as(Identity(folder))


@pytest.fixture
def authority(tmp_path):
    yield Authority.create(tmp_path / "ca")
    rpc.act_as(None)


@pytest.fixture
def serve(tmp_path):
    """Run a scheduler in a thread, because the check blocks."""
    stops = []

    def start(authority):
        act(tmp_path / "scheduler", authority, Role.SCHEDULER)
        loop, ready, address = asyncio.new_event_loop(), threading.Event(), [""]
        stop = asyncio.Event()

        async def run():
            async with SchedulerServer(Options(topic=TOPIC)) as server:
                address[0] = server.address
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        assert ready.wait(20)
        stops.append((loop, stop, thread))
        return address[0]

    yield start
    for loop, stop, thread in stops:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def found(address):
    settings = load({"scheduler": {"address": address, "topic": TOPIC}, "security": {"tls": True}})
    return {one.subject: one for one in certificates.findings(settings)}


def test_it_says_who_until_when_and_of_which_ca(tmp_path, authority, serve, monkeypatch):
    """Certificates are renewed at half their lifetime, so one near its end was not renewed."""
    address = serve(authority)
    act(tmp_path / "operator", authority, Role.OPERATOR)
    shown = found(address)
    assert {one.verdict for one in shown.values()} == {Verdict.OK}
    assert shown["this process"].what.startswith("spiffe://baton/test/operator, until 20")
    assert authority.pin in shown["CA"].what
    assert shown[f"scheduler at {address}"].what.startswith("spiffe://baton/test/scheduler, until 20")
    monkeypatch.setattr(certificates, "_PART", 1)  # its whole lifetime counts as near its end
    late = found(address)[f"scheduler at {address}"]
    assert late.verdict is Verdict.WARNING
    assert "not renewed in time" in late.what


def test_a_different_ca_is_a_problem(tmp_path, authority, serve):
    address = serve(Authority.create(tmp_path / "other"))
    act(tmp_path / "operator", authority, Role.OPERATOR)
    one = found(address)[f"scheduler at {address}"]
    assert one.verdict is Verdict.WRONG
    assert "no handshake" in one.what


def test_without_tls_it_says_so():
    (one,) = certificates.findings(load())
    assert "off (security.tls)" in one.what
