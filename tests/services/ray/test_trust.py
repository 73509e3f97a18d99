import asyncio
import time
from pathlib import Path

import pytest

from baton.security.authority import Authority
from baton.services.config import Settings
from baton.services.ray import trust
from baton.services.ray.trust import Trust
from harness.scheduling import until


@pytest.fixture
def settings(tmp_path):
    return Settings(security={"tls": True, "ca": str(tmp_path / "ca")})


def expiries(settings):
    return [one.expires_at for one in Authority(Path(settings.security.ca)).tokens.all().values()]


async def test_tokens_end_by_themselves_where_the_owner_is_killed(settings):
    Trust(settings, "127.0.0.1")  # never ended properly
    assert len(expiries(settings)) == 4
    assert all(at - time.time() <= 3_600 for at in expiries(settings))


async def test_tokens_are_good_while_the_owner_lives(settings, monkeypatch):
    monkeypatch.setattr(trust, "EXTEND_S", 0.01)
    monkeypatch.setattr(trust, "VALID_S", 2.0)
    async with Trust(settings, "127.0.0.1"):
        ends = set()

        async def extended_often():
            ends.add(max(await asyncio.to_thread(expiries, settings)))
            return len(ends) > 3

        await until(extended_often)
    assert not expiries(settings)  # a proper end revokes them


def test_without_tls_parts_get_the_settings_own_section():
    plain = Trust(Settings(security={"insecure": True}), "127.0.0.1").section("worker")
    assert (plain["tls"], plain["insecure"]) == (False, True)
