import asyncio
from contextlib import asynccontextmanager

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
    return Authority.create(tmp_path / "ca")


@asynccontextmanager
async def checked(folder, of_scheduler, of_operator):
    """Run a scheduler, and yield a function that returns an operator's findings; each has its own CA."""
    act(folder / "scheduler", of_scheduler, Role.SCHEDULER)
    async with SchedulerServer(Options(topic=TOPIC)) as server:
        act(folder / "operator", of_operator, Role.OPERATOR)
        scheduler = {"address": server.address, "topic": TOPIC}
        settings = load({"scheduler": scheduler, "security": {"tls": True}})

        async def found():
            listed = await asyncio.to_thread(lambda: list(certificates.findings(settings)))
            return {one.subject.replace(server.address, "ADDRESS"): one for one in listed}

        yield found


async def test_it_says_who_until_when_and_of_which_ca(tmp_path, authority, monkeypatch):
    """Certificates are renewed at half their lifetime, so one near its end was not renewed."""
    async with checked(tmp_path, authority, authority) as found:
        shown = await found()
        assert {one.verdict for one in shown.values()} == {Verdict.OK}
        assert shown["this process"].what.startswith("spiffe://baton/test/operator, until 20")
        assert authority.pin in shown["CA"].what
        assert shown["scheduler at ADDRESS"].what.startswith("spiffe://baton/test/scheduler, until 20")
        monkeypatch.setattr(certificates, "_PART", 1)  # its whole lifetime counts as near its end
        late = (await found())["scheduler at ADDRESS"]
    assert late.verdict is Verdict.WARNING
    assert "not renewed in time" in late.what


async def test_a_different_ca_is_a_problem(tmp_path, authority):
    async with checked(tmp_path, Authority.create(tmp_path / "other"), authority) as found:
        one = (await found())["scheduler at ADDRESS"]
    assert one.verdict is Verdict.WRONG
    assert "no handshake" in one.what


def test_without_tls_it_says_so():
    (one,) = certificates.findings(load())
    assert "off (security.tls)" in one.what
