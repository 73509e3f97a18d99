import pytest

from baton.services.tenants import shared
from baton.services.tenants.shared import SharedStore
from tests.scheduler.conftest import own_redis as own_redis
from tests.scheduler.conftest import redis_server as redis_server
from tests.scheduler.conftest import topic as topic


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Raise the timeout of calls: on a busy machine 0.5 s may be too short."""
    monkeypatch.setattr(shared, "CALL_S", 10.0)


@pytest.fixture
async def share(topic):
    """Yield a function that connects another router to a Redis."""
    made = []

    async def another(url):
        made.append(SharedStore(url, topic))
        made[-1].start()
        return made[-1]

    yield another
    for one in made:
        await one.close()
