from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton import rpc
from baton.security import identity
from baton.security.authority import LIFE_S, Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role

TOPIC = "test"
Become = Callable[..., Identity]


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca")


@pytest.fixture
def become(ca: Authority, tmp_path: Path) -> Iterator[Become]:
    """Return a function that gives this process another identity for new servers and channels."""
    number = itertools.count()

    def change(
        role: Role, worker_id: str = "", *, by: Authority = ca, topic: str = TOPIC, life_s: float = LIFE_S
    ) -> Identity:
        folder = tmp_path / f"identity-{next(number)}"
        identity.write(folder, by.issue(Name(topic, role, worker_id), life_s))
        mine = Identity(folder)
        rpc.act_as(mine)
        return mine

    yield change
    rpc.act_as(None)
