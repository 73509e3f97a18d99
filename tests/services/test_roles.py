"""Roles are found by name."""

from __future__ import annotations

import pytest

from baton.protos import scheduler_pb2
from baton.services import roles
from baton.services.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "wire", "decodes"),
    [
        ("prefill", scheduler_pb2.ROLE_PREFILL, False),
        ("decode", scheduler_pb2.ROLE_DECODE, True),
        ("mixed", scheduler_pb2.ROLE_MIXED, True),
    ],
)
def test_a_name_finds_its_role(name: str, wire: scheduler_pb2.Role, decodes: bool) -> None:
    role = roles.role(name)
    assert (role.name, role.wire, role.decodes) == (name, wire, decodes)
    assert roles.name_of(wire) == name


def test_an_unspecified_role_has_no_name() -> None:
    assert roles.name_of(scheduler_pb2.ROLE_UNSPECIFIED) == ""


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'decode'\?; allowed: prefill, decode, mixed"):
        roles.role("encode")
