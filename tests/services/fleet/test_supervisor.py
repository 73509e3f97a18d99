"""The checks and addresses of a deployment, before any process starts."""

from __future__ import annotations

import pytest

from baton.services.config import load
from baton.services.errors import ConfigError
from baton.services.fleet.supervisor import scheduler_addresses


@pytest.mark.parametrize(
    ("given", "number", "listens"),
    [
        ("127.0.0.1:7400", 1, ["127.0.0.1:7400"]),
        ("[::1]:7400", 3, ["[::1]:7400", "[::1]:7401", "[::1]:7402"]),
        ("127.0.0.1:7400, 127.0.0.1:7500", 2, ["127.0.0.1:7400", "127.0.0.1:7500"]),
    ],
)
def test_schedulers_listen_on_the_configured_ports_or_the_next_ones(
    given: str, number: int, listens: list[str]
) -> None:
    assert scheduler_addresses(load({"scheduler": {"address": given}}), number) == listens


def test_other_numbers_of_addresses_than_schedulers_are_refused() -> None:
    settings = load({"scheduler": {"address": "a:1,b:2"}})
    for number in (1, 3):
        with pytest.raises(ConfigError, match=f"names 2 schedulers and --schedulers is {number}"):
            scheduler_addresses(settings, number)
