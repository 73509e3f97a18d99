"""Redis URLs."""

import pytest

from baton.redis_link import RedisPlace


@pytest.mark.parametrize(
    ("url", "hosts", "service", "options"),
    [
        ("redis://h", [("h", 6379)], "", {}),
        ("redis://:p%40ss@h:1/2", [("h", 1)], "", {"password": "p@ss", "db": 2}),
        ("redis+sentinel://h,[::1]:7/m", [("h", 26379), ("::1", 7)], "m", {}),
        (
            "rediss+sentinel://u:p@h:1,g:2/m/3",
            [("h", 1), ("g", 2)],
            "m",
            {"username": "u", "password": "p", "db": 3},
        ),
        ("redis+cluster://:p@h:1,g", [("h", 1), ("g", 6379)], "", {"password": "p"}),
        ("rediss+cluster://h?ssl_ca_certs=/x", [("h", 6379)], "", {"ssl_ca_certs": "/x"}),
    ],
)
def test_valid_urls(url, hosts, service, options):
    place = RedisPlace.of(url)
    assert (list(place.hosts), place.service, place.options) == (hosts, service, options)
    assert place.tls == url.startswith("rediss")


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h:1",
        "redis+sentinel:///m",
        "redis+cluster://h/1",
        "redis+cluster://h:1,",
        "redis+x://h",
    ],
)
def test_invalid_urls(url):
    with pytest.raises(ValueError, match=r"host|name|databases|not a Redis URL"):
        RedisPlace.of(url)
