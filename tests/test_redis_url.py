"""Passwords in Redis URLs."""

import pytest

from baton.redis_url import has_password, password_file, without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@host:6379/0", "redis://host:6379/0"),
        ("rediss://user:s3cret@host/1", "rediss://user@host/1"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        ("redis://:@host", "redis://host"),
        ("redis://:s3/cr?et#@host:6379/0", "redis://host:6379/0"),  # not percent-encoded
        ("redis://user:s3@cret@host", "redis://user@host"),
        ("redis://s3cret@host", "redis://host"),
        ("redis://host/0?password=s3cret&db=1", "redis://host/0"),
        ("redis://host/0?password_file=/run/baton@1/pw", "redis://host/0"),
    ],
)
def test_the_password_is_not_shown(url, shown):
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "has"),
    [
        *(("redis://:a@host", True), ("redis://u:a@host", True), ("redis://host?password=a", True)),
        *(("redis://host?password_file=/a@b:c", False), ("redis://host?password_file=/a&password=b", True)),
        *(("redis://host/0", False), ("redis://u@host", False), ("redis://:@host", False), ("memory", False)),
    ],
)
def test_a_password_in_a_url_is_recognised(url, has):
    assert has_password(url) is has


@pytest.mark.parametrize("path", ["/run/pw", "/run/baton@1.service/pw", "/a+b", "/a b"])
def test_the_path_of_a_password_file_is_found(path):
    assert password_file(f"redis://user@host/0?db=1&password_file={path}&x=y") == path
    assert password_file(f"redis+sentinel://one:1,two:2/main?password_file={path}") == path
