import itertools

import pytest

from baton import rpc
from baton.security import identity
from baton.security.authority import LIFE_S, Authority
from baton.security.identity import Identity
from baton.security.names import Name

TOPIC = "test"


@pytest.fixture
def ca(tmp_path):
    return Authority.create(tmp_path / "ca")


@pytest.fixture
def become(ca, tmp_path):
    """Return a function that gives this process another identity for new servers and channels."""
    number = itertools.count()

    def change(role, worker_id="", *, by=ca, topic=TOPIC, life_s=LIFE_S):
        folder = tmp_path / f"identity-{next(number)}"
        identity.write(folder, by.issue(Name(topic, role, worker_id), life_s))
        mine = Identity(folder)
        rpc.act_as(mine)
        return mine

    yield change
    rpc.act_as(None)
