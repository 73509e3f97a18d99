import gc
import warnings

import pytest

with warnings.catch_warnings():  # torch warns of its own deprecations while it is imported
    warnings.simplefilter("ignore")
    from baton.services.router.vllm import frontend  # noqa: F401 (all that warns, before a test imports it)
    from harness.router import Cluster


@pytest.fixture
def no_garbage_collection():
    gc.collect()  # what earlier tests left
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def cluster():
    """Yield a scheduler and a router's engine client. Afterwards nothing may be left of the requests."""
    async with Cluster() as made:
        yield made
        made.client.abort(list(made.got))
        await made.settled()
