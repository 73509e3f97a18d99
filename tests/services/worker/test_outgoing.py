"""Followers with an attempt's key get its state, in order, whenever they call."""

import asyncio
from contextlib import ExitStack

import grpc
import pytest

from baton.protos.handoff_pb2 import EmbeddingManifest, Manifest
from baton.protos.worker_pb2 import Complete, FollowRequest
from baton.services.worker import outgoing as module
from baton.services.worker.outgoing import NotFollowedError, Outgoing
from harness.support import PATIENCE

KEY, OTHER = b"sixteen bytes ok", b"sixteen others ."


class Site:
    """A worker's handoffs, the manifests it released, and open calls of followers."""

    def __init__(self, calls):
        self.released = []
        self.outgoing = Outgoing(self.released.append)
        self._calls = calls

    def begin(self, name="a", epoch=1, session=1, key=KEY, left_s=60.0):
        self.outgoing.begin(name, epoch, key, session, left_s)

    def begun(self, name="a", epoch=1, lease_s=60.0):
        manifest = self.manifest(name, epoch, lease_s)
        self.outgoing.begun(name, epoch, manifest)
        return manifest

    def complete(self, name="a", epoch=1, lease_s=60.0):
        complete = Complete(manifest=self.manifest(name, epoch, lease_s), token_ids=[7])
        self.outgoing.complete(name, epoch, complete)
        return complete

    def keep(self, name, epoch=1, session=1, lease_s=60.0):
        self.begin(name, epoch, session)
        return self.complete(name, epoch, lease_s)

    def follow(self, name="a", epoch=1, key=KEY):
        request = FollowRequest(request_id=name, epoch=epoch, key=key)
        return self._calls.enter_context(self.outgoing.follower(request))

    def refusal(self, name="a", **how):
        """Follow, which must be refused; return the status."""
        with pytest.raises(NotFollowedError) as caught:
            self.follow(name, **how)
        return caught.value.code

    @staticmethod
    def manifest(name, epoch, lease_s=60.0):
        return Manifest(request_id=f"{name}#{epoch}", epoch=epoch, lease_s=lease_s)


@pytest.fixture
def site():
    with ExitStack() as calls:
        yield Site(calls)


async def said(follower):
    async with asyncio.timeout(5 * PATIENCE):
        return await follower.next()


async def refused(follower):
    with pytest.raises(NotFollowedError) as caught:
        await said(follower)
    return caught.value.code


@pytest.mark.parametrize("comes", ["before", "begun", "kept"])
async def test_a_follower_may_call_at_any_time(site, comes):
    follower = site.follow() if comes == "before" else None
    site.begin()
    manifest = site.begun()
    follower = site.follow() if comes == "begun" else follower
    complete = site.complete()
    follower = follower or site.follow()
    if comes != "kept":
        assert (await said(follower)).begun == manifest
    assert (await said(follower)).complete == complete
    assert site.released == []


ENDS = {
    "over": lambda outgoing: outgoing.over("a", 1),
    "released": lambda outgoing: outgoing.release("a"),
    "stream": lambda outgoing: outgoing.release_of_session(1),
    "later attempt": lambda outgoing: outgoing.supersede("a", 2),
}


@pytest.mark.parametrize("how", [*ENDS, "pulled"])
async def test_the_end_of_a_handoff_is_reported_before_and_after_it(site, how):
    site.begin()
    site.begun()
    before = site.follow()
    assert (await said(before)).HasField("begun")
    if how == "pulled":
        site.complete()
        assert (await said(before)).HasField("complete")
        site.outgoing.renewed(site.outgoing.to_renew(), set(), 0.0)
    else:
        ENDS[how](site.outgoing)
        assert (await said(before)).HasField("problem")
        assert len(site.released) == 1
    after = await said(site.follow())
    name = {"over": "NothingSaved", "later attempt": "StaleEpoch"}.get(how, "UnknownHandoff")
    assert after.problem.name == name
    site.outgoing.over("a", 1)  # no effect
    site.outgoing.release("a")
    assert len(site.released) == (how != "pulled")


async def test_saved_kv_outlives_its_attempt_and_its_follower(site):
    complete = site.keep("a")
    site.outgoing.over("a", 1)  # the attempt has ended
    with site.outgoing.follower(FollowRequest(request_id="a", epoch=1, key=KEY)) as follower:
        assert (await said(follower)).complete == complete
    assert (await said(site.follow())).complete == complete
    assert site.released == []


async def test_a_follower_needs_the_attempts_key(site):
    early = site.follow(key=OTHER)
    site.begin()
    assert await refused(early) == grpc.StatusCode.PERMISSION_DENIED
    for key in (OTHER, KEY[:-1], b""):
        assert site.refusal(key=key) == grpc.StatusCode.PERMISSION_DENIED
    site.begin("keyless", key=b"")
    assert site.refusal("keyless", key=b"") == grpc.StatusCode.PERMISSION_DENIED


async def test_of_two_early_followers_the_one_with_the_key_stays(site):
    right, wrong = site.follow(), site.follow(key=OTHER)
    site.begin()
    assert await refused(wrong) == grpc.StatusCode.PERMISSION_DENIED
    site.complete()
    assert (await said(right)).HasField("complete")


async def test_a_second_follower_replaces_the_first(site):
    site.begin()
    first, second = site.follow(), site.follow()
    assert await refused(first) == grpc.StatusCode.ABORTED
    site.complete()
    assert (await said(second)).HasField("complete")


async def test_a_follower_times_out_without_its_attempt(site, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    request = FollowRequest(request_id="a", epoch=1, key=KEY)
    with site.outgoing.follower(request) as follower:
        assert await refused(follower) == grpc.StatusCode.NOT_FOUND
    assert site.outgoing.followers == 0
    site.begin()
    assert site.refusal(epoch=0) == grpc.StatusCode.NOT_FOUND  # an earlier attempt


async def test_a_refused_follower_does_not_follow_an_attempt_that_arrives_then(site, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    follower = site.follow()
    async with asyncio.timeout(5 * PATIENCE):
        while not follower.is_refused:  # noqa: ASYNC110 (a follower has no event)
            await asyncio.sleep(0)
    site.begin()
    site.begun()
    assert await refused(follower) == grpc.StatusCode.NOT_FOUND


async def test_the_number_of_waiting_followers_is_limited(site, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    with ExitStack() as calls:
        for name in "abc":
            calls.enter_context(site.outgoing.follower(FollowRequest(request_id=name, epoch=1, key=KEY)))
        assert site.refusal("d") == grpc.StatusCode.RESOURCE_EXHAUSTED
        site.begin("a")
        site.follow("d")
    assert site.outgoing.followers == 1


async def test_ended_handoffs_are_remembered_in_limited_number_and_time(site, monkeypatch):
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    for name in "abc":
        site.begin(name)
        site.outgoing.over(name, 1)
    assert list(site.outgoing._handoffs) == ["b", "c"]
    monkeypatch.setattr(module, "REMEMBER_S", 0.0)
    site.begin("d")
    site.outgoing.over("d", 1)
    site.outgoing.release("b")
    assert "d" in site.outgoing._handoffs  # forgotten only after those that ended before it
    for one in site.outgoing._past.values():
        one.until_s = 0.0
    site.outgoing.forget_expired()
    assert site.outgoing._handoffs == {}


async def test_a_later_attempt_is_a_new_handoff(site):
    first = site.keep("a")
    site.begin(epoch=2)
    assert site.released == [first.manifest]
    late = Complete(manifest=site.manifest("a", 1))
    site.outgoing.complete("a", 1, late)
    assert site.released[1:] == [late.manifest]
    follower = site.follow(epoch=2)
    second = site.complete(epoch=2)
    assert (await said(follower)).complete == second


async def test_followers_are_refused_when_the_worker_shuts_down(site):
    site.begin()
    here, waits = site.follow(), site.follow("b")
    site.outgoing.hang_up()
    assert await refused(here) == grpc.StatusCode.UNAVAILABLE
    assert await refused(waits) == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(NotFollowedError, match="this worker is shutting down"):
        site.follow()


# -- leases


def names(site):
    return [one.request_id for one in site.outgoing.to_renew()]


async def test_held_handoffs_are_renewed_and_others_end(site):
    for name in ("pulled", "held", "replaced"):
        site.keep(name, lease_s=0.5 * PATIENCE)
    assert names(site) == ["pulled#1", "held#1", "replaced#1"]
    asked = site.outgoing.to_renew()
    site.keep("replaced", epoch=2)
    site.keep("since")
    site.outgoing.renewed(asked, {("held#1", 1)}, at_s=asyncio.get_running_loop().time() + 100)
    assert names(site) == ["held#1", "replaced#2", "since#1"]
    assert site.outgoing._leased["held"].until_s > asyncio.get_running_loop().time() + 90
    assert [one.request_id for one in site.released] == ["replaced#1"]


async def test_saves_of_requests_after_their_deadline_are_not_renewed(site):
    site.begin("its release was lost", left_s=0.0)
    site.complete("its release was lost")
    site.keep("held")
    assert names(site) == ["held#1"]
    assert (await said(site.follow("its release was lost"))).HasField("complete")  # until its lease ends


async def test_a_handoff_ends_with_its_lease(site):
    site.keep("over", lease_s=0.0)
    site.keep("held")
    site.keep("another", session=2)
    assert (await said(site.follow("over"))).problem.name == "LeaseExpired"
    assert names(site) == ["held#1", "another#1"]
    site.outgoing.release_of_session(1)
    assert [one.request_id for one in site.released] == ["held#1"]


async def test_many_leases_that_end_at_once(site):
    for number in range(3000):
        site.keep(f"r{number}", lease_s=0.3 * PATIENCE)
    for one in site.outgoing._leased.values():
        one.until_s = 0.0
    assert names(site) == []


async def test_a_prompt_may_complete_after_its_first_lease_has_ended(site):
    site.begin()
    site.begun(lease_s=0.0)
    assert names(site) == []
    follower = site.follow()
    complete = site.complete()
    assert names(site) == ["a#1"]
    assert (await said(follower)).HasField("begun")
    assert (await said(follower)).complete == complete


async def test_embeddings_are_told_and_released_once(site):
    site.begin("image")
    early = site.follow("image")
    complete = Complete(embedding=EmbeddingManifest(identifier="i", lease_s=60.0))
    site.outgoing.complete("image", 1, complete)
    assert (await early.next()).complete == complete
    assert (await site.follow("image").next()).complete == complete
    assert site.outgoing.to_renew() == []
    for _ in range(2):
        site.outgoing.release("image")
    assert site.released == [complete.embedding]
    site.outgoing.complete("image", 1, complete)  # too late
    assert site.released == [complete.embedding] * 2
    assert (await site.follow("image").next()).problem.name == "UnknownHandoff"


def test_embeddings_are_leased_until_their_router_releases_them(site):
    site.begin()
    assert not site.outgoing.leased
    site.outgoing.complete("a", 1, Complete(embedding=EmbeddingManifest(lease_s=60.0)))
    assert site.outgoing.leased
    site.outgoing.release("a")
    assert not site.outgoing.leased
    site.begin(epoch=2)
    site.outgoing.complete("a", 2, Complete(embedding=EmbeddingManifest(lease_s=0.0)))
    assert not site.outgoing.leased
    assert len(site.released) == 2
