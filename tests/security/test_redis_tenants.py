"""Keys and limits in Redis over TLS, whose users have the rules in docs/security.md."""

import contextlib
import re
import uuid

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError
from typer.testing import CliRunner

from baton.errors import BatonError
from baton.services.cli.main import app
from baton.services.tenants import redis_keys, shared
from baton.services.tenants.model import ApiKey, Book, BookError, Caller, Limits, OverLimit, Tenant
from baton.services.tenants.quotas import Quotas
from baton.services.tenants.redis_book import RedisBook
from baton.services.tenants.shared import SharedStore
from tests.security.acl import ADMIN, PASSWORD, GuardedRedis, rules

TOPIC = f"acl-{uuid.uuid4().hex[:8]}"
USERS = ("baton-router", "baton-keys")
RULES = {user: rules(user, TOPIC) for user in USERS}
KEY = ApiKey(tenant="acme", sha256="a" * 64)
CALLER = Caller("web", "acme", Limits(), Tenant(requests_per_s=50, tokens_per_min=600, concurrency=5))


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with GuardedRedis(tmp_path_factory.mktemp("redis"), *RULES.values(), ADMIN) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(shared, "CALL_S", 10.0)  # the machine may be busy
    monkeypatch.setattr(shared, "PROBE_S", 60.0)


@contextlib.asynccontextmanager
async def book(redis, user):
    """Yield the book as a user sees it. The password is not in the URL."""
    made = RedisBook(redis.url(user, ""), TOPIC, PASSWORD, for_router=user == "baton-router")
    try:
        yield made
    finally:
        await made.close()


async def key_work(redis):
    """Do everything that `baton key` does, including a refused edit."""
    async with book(redis, "baton-keys") as mine:
        await mine.edit(lambda _: Book())
        with pytest.raises(BookError, match="there is no key 'nobody'"):
            await mine.edit(lambda held: held.without_key("nobody"))
        await mine.edit(lambda held: held.with_key("web", KEY))
        assert (await mine.changed() or Book()).keys == {"web": KEY}


async def router_work(redis):
    """Do everything that two routers do with limits."""
    async with book(redis, "baton-router") as mine:
        assert await mine.changed() is not None
    stores = [SharedStore(redis.url("baton-router", ""), TOPIC, PASSWORD) for _ in range(2)]
    one, two = [Quotas(store, f"r{number}") for number, store in enumerate(stores)]
    for store in stores:
        store.start()
    try:
        visits = [await one.enter(CALLER) for _ in range(4)]
        async with Redis.from_url(redis.url("admin", "x")) as admin:  # as if from a dead router
            await admin.hset(redis_keys.slots(TOPIC, "tenant:acme"), "dead", "9 0 0")
        visits.append(await two.enter(CALLER))
        await visits[0].charge("a", 100, 300)
        assert all(store.up for store in stores)  # otherwise limits are not shared
        with pytest.raises(OverLimit):
            await two.enter(CALLER)
        with pytest.raises(OverLimit):
            await visits[4].charge("b", 100, 300)
        visits[0].settle("a", 0)
        for visit in visits:
            visit.leave()
        for store in stores:
            await store._write()  # as after an outage
            await store._later.join()
            assert store.up
        await (await two.enter(CALLER)).charge("c", 100, 300)
        assert all(store.up for store in stores)
    finally:
        for store in stores:
            await store.close()


async def test_the_rules_on_the_page_are_sufficient(redis):
    await key_work(redis)
    await router_work(redis)


def _rights():
    return [(user, right) for user, line in RULES.items() for right in re.findall(r" \+(\S+)", line)]


@pytest.mark.parametrize(("user", "right"), _rights(), ids=lambda part: part.replace("|", "-"))
async def test_every_permission_is_needed(redis, user, right):
    async with Redis.from_url(redis.url("admin", "x")) as admin:
        await admin.flushall()
        await admin.script_flush()
        await key_work(redis)
        await admin.execute_command("ACL", "SETUSER", user, f"-{right}")
        try:
            with pytest.raises((AssertionError, BookError, NoPermissionError)):
                await (key_work if user == "baton-keys" else router_work)(redis)
        finally:
            await admin.execute_command("ACL", "SETUSER", user, f"+{right}")


async def test_a_router_cannot_change_keys(redis):
    async with book(redis, "baton-router") as mine:
        with pytest.raises(BookError, match="does not allow this user enough") as error:
            await mine.edit(lambda held: held.with_key("own", KEY))
    assert "docs/security.md" in str(error.value)
    assert PASSWORD not in str(error.value)


async def test_topics_are_separate(redis, caplog):
    for user in USERS:
        other = RedisBook(redis.url(user), f"{TOPIC}-2")
        with pytest.raises(BookError, match="does not allow this user enough"):
            await other.changed()
        await other.close()
    store = SharedStore(redis.url("baton-router"), f"{TOPIC}-2")
    (await Quotas(store, "r").enter(CALLER)).leave()  # requests do not fail
    assert not store.up
    assert "does not allow this user enough" in caplog.text
    await store.close()


def test_baton_key_reads_the_password_from_a_file(redis, tmp_path):
    file = tmp_path / "password"
    file.touch(0o600)
    place = ["--keys-store", f"{redis.url('baton-keys', '')}&password_file={file}", "--topic", TOPIC]

    def run(*words):
        return CliRunner().invoke(app, ["key", *words, *place], catch_exceptions=False).output

    file.write_text(f"{PASSWORD}\n")
    run("add", "by-file")
    assert "by-file" in run("list")
    file.write_text("guess\n")
    with pytest.raises(
        BatonError, match=r"refused the password .*router\.keys_store or its password_file"
    ) as error:
        run("list")
    assert "guess" not in str(error.value)
