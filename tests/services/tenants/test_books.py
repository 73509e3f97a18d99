import asyncio
import os

import pytest

from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import ApiKey, Book, BookError, Tenant
from baton.services.tenants.redis_book import RedisBook
from baton.services.tenants.redis_keys import book as book_key


def key(number):
    return ApiKey(tenant="acme", sha256=f"{number:064x}")


@pytest.fixture(params=["file", "redis"])
async def places(request, tmp_path, topic):
    """Yield a book as two processes see it."""
    if request.param == "file":
        made = FileBook(str(tmp_path / "keys.yaml")), FileBook(str(tmp_path / "keys.yaml"))
    else:
        url = request.getfixturevalue("redis_server").url
        made = RedisBook(url, topic), RedisBook(url, topic)
    yield made
    for one in made:
        await one.close()


async def test_edits_are_seen_once(places):
    writer, reader = places
    with pytest.raises(BookError):
        await reader.changed()  # it does not exist yet
    await writer.edit(lambda held: held.with_key("a", key(1)))
    await writer.edit(lambda held: held.with_tenant("acme", Tenant(tokens_per_min=5, cache_salt=False)))
    book = await reader.changed()
    assert book == Book(tenants={"acme": Tenant(tokens_per_min=5, cache_salt=False)}, keys={"a": key(1)})
    assert await reader.changed() is None
    await writer.edit(lambda held: held.without_key("a"))
    book = await reader.changed()
    assert not book.keys


async def test_a_refused_edit_changes_nothing(places):
    writer, reader = places
    await writer.edit(lambda held: held.with_key("a", key(1)))
    await reader.changed()
    with pytest.raises(BookError, match="already"):
        await writer.edit(lambda held: held.with_key("a", key(2)))
    assert await reader.changed() is None


async def test_no_edit_is_lost_among_many_at_once(places):
    writer, reader = places
    edits = [lambda held, at=at: held.with_key(f"k{at}", key(at)) for at in range(8)]
    await asyncio.gather(*((writer, reader)[at % 2].edit(edit) for at, edit in enumerate(edits)))
    book = await writer.changed()
    assert sorted(book.keys) == [f"k{at}" for at in range(8)]


async def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path):
    file = tmp_path / "keys.yaml"
    place = FileBook(str(file))
    await place.edit(lambda held: held.with_key("a", key(1)))
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    link = tmp_path / "link.yaml"  # a mounted secret is a link, too
    link.symlink_to(file)
    await FileBook(str(link)).edit(lambda held: held.with_key("b", key(2)))
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["keys.yaml", "link.yaml"]
    assert sorted(place.read().keys) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"keys: {a: {tenant: c4nary}}", "keys.a.sha256: Field required"),
        (b"keys: [c4nary\n", "not valid YAML: line 2, column 1"),
        (b"\xff", "not a text file in UTF-8"),
        (b"keys: !c4nary x", "not valid YAML: line 1, column 7"),
        # Another type of error would end the task that follows the file: revoked keys would stay valid.
        (b"keys: !!int x", ""),
        (b"keys: !!timestamp x", ""),
        (b"keys: !!float x", ""),
        (b"keys: !!timestamp 2024-02-30", ""),
        (b"keys: !!bool x", ""),
        (b"keys: " + b"[" * 5_000, ""),
        (b"? [1]\n: 2", ""),
        (b"1: 2", ""),
        (b"keys: {a: {tenant: 7, sha256: 1e5}}", ""),
    ],
)
async def test_an_invalid_file_is_reported_with_its_path(tmp_path, text, said):
    file = tmp_path / "keys.yaml"
    file.write_bytes(text)
    with pytest.raises(BookError, match=said or "keys.yaml") as error:
        await FileBook(str(file)).changed()
    assert str(file) in str(error.value)
    assert "c4nary" not in str(error.value)


async def test_an_unwritable_folder_is_reported(tmp_path):
    with pytest.raises(BookError, match="cannot be written: No such file"):
        await FileBook(str(tmp_path / "nowhere" / "k")).edit(lambda held: held)


async def test_a_redis_without_its_book_is_reported_without_its_password(redis_server, topic):
    place = RedisBook(redis_server.url, topic)
    await place.edit(lambda held: held.with_key("a", key(1)))
    assert await place.changed() is not None
    await place._client.delete(book_key(topic))
    with pytest.raises(BookError, match="holds no keys") as error:
        await place.changed()
    assert "s3cret" not in str(error.value)
    await place._client.hset(book_key(topic), mapping={"version": "1", "book": "{"})
    with pytest.raises(BookError, match="the book is damaged"):
        await place.changed()
    await place.close()
    nobody = RedisBook("redis://:s3cret@127.0.0.1:1/0", topic)
    with pytest.raises(BookError, match="no answer") as error:
        await nobody.edit(lambda held: held)
    assert "s3cret" not in str(error.value)
    await nobody.close()


async def test_what_looks_like_a_date_is_a_name(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: {{2024-01-31: {{tenant: 2024-02-30, sha256: '{7:064x}'}}}}")
    book = await FileBook(str(file)).changed()
    assert book.keys["2024-01-31"].tenant == "2024-02-30"
