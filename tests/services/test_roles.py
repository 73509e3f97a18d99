"""Roles are found by name."""

from __future__ import annotations

import pytest

from baton.protos import scheduler_pb2
from baton.services import roles
from baton.services.errors import ConfigError


def test_an_unspecified_role_has_no_name() -> None:
    assert roles.name_of(scheduler_pb2.ROLE_UNSPECIFIED) == ""


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'decode'\?; allowed: prefill, decode, mixed"):
        roles.role("encode")
