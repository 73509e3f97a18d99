from types import SimpleNamespace

import pytest

from baton.services.router.http.authentication import CALLER
from baton.services.router.vllm import response_store
from baton.services.router.vllm.response_store import ResponseStore
from baton.services.tenants.model import Caller, Limits, Tenant
from harness.scheduling import Clock


class Answer:
    def __init__(self, response_id, size):
        self.id, self.status, self._size = response_id, "completed", size

    def model_dump_json(self):
        return "x" * self._size


class Handler:
    """The parts of vLLM's handler that the store uses; it stores an answer of the requested size."""

    def __init__(self):
        self.enable_store = True
        self.event_store, self.background_tasks, self.response_store, self.msg_store = {}, {}, {}, {}

    async def create_responses(self, request, _raw_request):
        if request.store:
            self.msg_store[request.request_id] = []
            self.response_store[request.request_id] = Answer(request.request_id, request.size)
        return SimpleNamespace(id=request.request_id)

    async def _run_background_request(self): ...

    async def _run_background_request_stream(self): ...


class Site:
    def __init__(self):
        self.clock = Clock()
        self.store = ResponseStore(self.clock)
        self.handler = Handler()
        self.store.adopt(self.handler)

    async def make(self, tenant, size=100):
        caller = Caller("k", tenant, Limits(), Tenant())
        request = SimpleNamespace(store=True, request_id="mine", size=size)
        request.model_extra, request.previous_response_id, request.background = {}, None, False
        return str((await self.handler.create_responses(request, SimpleNamespace(scope={CALLER: caller}))).id)

    def has(self, response_id, tenant):
        found = self.store.find(response_id, tenant) is not None
        assert found == (response_id in self.handler.response_store)
        return found


@pytest.fixture
def site():
    return Site()


async def test_the_oldest_of_the_largest_tenant_goes_first(site, monkeypatch):
    monkeypatch.setattr(response_store, "MOST", 20)
    first = await site.make("small")
    flood = [await site.make("large") for _ in range(60)]
    assert site.has(first, "small")
    assert [site.has(one, "large") for one in flood] == [False] * 41 + [True] * 19
    for one in (first, *flood):
        site.store.delete(one)
    assert (len(site.store), site.store.size, site.handler.msg_store) == (0, 0, {})


async def test_bytes_are_bounded(site, monkeypatch):
    monkeypatch.setattr(response_store, "MOST_BYTES", 10_000)
    first = await site.make("small", 900)
    flood = [await site.make("large", 3000) for _ in range(9)]
    assert site.store.size <= 10_000
    assert site.has(first, "small")
    assert [site.has(one, "large") for one in flood[-3:]] == [True] * 3
    too_large = await site.make("large", 11_000)
    assert not site.has(too_large, "large")
    assert site.store.size <= 10_000


async def test_an_answer_is_kept_for_an_hour(site):
    first = await site.make("me")
    site.clock.now += response_store.AGE_S - 1
    second = await site.make("me")
    assert site.has(first, "me")
    site.clock.now += 2
    assert not site.has(first, "me")
    assert site.has(second, "me")
