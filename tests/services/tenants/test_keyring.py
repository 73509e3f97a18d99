import asyncio
import os

from baton import keeping
from baton.services.tenants import keyring as module
from baton.services.tenants.file_book import FileBook
from baton.services.tenants.keyring import Keyring
from baton.services.tenants.model import ApiKey, Book, digest
from baton.services.tenants.redis_book import RedisBook
from baton.tasks import stop
from harness.scheduling import until

NAMES = ("one", "two")


def book(*names):
    rows = [f"  {name}: {{tenant: of-{name}, sha256: {digest(name.encode()).hex()}}}\n" for name in names]
    return "keys:\n" + "".join(rows) if rows else "keys: {}\n"


def known(ring):
    return [name for name in (*NAMES, "three") if ring.find(name.encode()) is not None]


async def test_changes_take_effect_and_a_bad_edit_keeps_the_last_keys(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    caplog.set_level("INFO")
    file = tmp_path / "keys.yaml"
    file.write_text(book("one"))
    ring = Keyring(FileBook(str(file)))
    assert ring.problem
    await ring.look()
    assert (ring.problem, known(ring)) == ("", ["one"])
    following = asyncio.create_task(ring.follow())

    async def becomes(*names):
        await until(lambda: known(ring) == list(names))

    file.write_text(book("one", "two"))
    await becomes("one", "two")
    caller = ring.find(b"two")
    assert (caller.key, caller.tenant) == ("two", "of-two")
    assert set(ring.tenants()) == {"of-one", "of-two"}
    file.write_text("keys: [")

    await until(lambda: any(record.levelname == "ERROR" for record in caplog.records))
    await asyncio.sleep(0.1)  # some checks later it is still logged once
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "the last keys stay" in errors[0]
    assert known(ring) == ["one", "two"]
    file.unlink()  # missing for a moment, as when an editor saves
    fresh = tmp_path / "fresh"
    fresh.write_text(book("two", "three"))
    os.rename(fresh, file)
    await becomes("two", "three")
    assert set(ring.tenants()) == {"of-two", "of-three"}
    file.write_text(book())
    await becomes()
    following.cancel()


async def test_keys_outlive_their_redis(own_redis, topic, caplog):
    place = RedisBook(own_redis.url, topic)
    ring = Keyring(place)
    await ring.look()
    assert "baton key add" in ring.problem  # no key was ever added
    await place.edit(lambda held: held.with_key("k", ApiKey(tenant="t", sha256=digest(b"one").hex())))
    await ring.look()
    assert known(ring) == ["one"]
    own_redis.stop()
    caplog.clear()
    for _ in range(3):
        await ring.look()
    assert known(ring) == ["one"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    own_redis.start()  # it restarts empty
    await ring.look()
    assert known(ring) == ["one"]
    assert "holds no keys" in caplog.text
    await ring.close()


async def test_a_thousand_keys_are_read_in_a_moment(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(book(*(f"k{number}" for number in range(1_000))))
    ring = Keyring(FileBook(str(file)))
    began = os.times()
    await ring.look()
    ended = os.times()
    assert ring.find(b"k999") is not None
    assert ended.user - began.user < 2.0  # s of CPU; 0.2 s with libyaml


class Broken:
    """A source that fails with a bug at the second look, and lacks a key at the third."""

    def __init__(self):
        self.looks = 0

    async def changed(self):
        self.looks += 1
        if self.looks == 2:
            raise KeyError("a bug")
        names = ("one", "two") if self.looks == 1 else ("one",)
        keys = {name: ApiKey(tenant="a", sha256=digest(name.encode()).hex()) for name in names}
        return Book(keys=keys)

    async def close(self):
        pass


async def test_a_revoked_key_is_refused_though_a_bug_ended_the_task(caplog, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(keeping, "PAUSE_S", 0.01)
    ring = Keyring(Broken())
    await ring.look()
    assert known(ring) == ["one", "two"]
    following = keeping.keep(ring.follow, "changes of the keys")

    await until(lambda: known(ring) == ["one"])
    assert "changes of the keys failed because of a bug; restarting it" in caplog.text
    await stop(following)
