"""A scheduler over a Redis with TLS whose user has the rules of docs/security.md, and over one with less."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import StoreRefuses
from baton.scheduler.service import SchedulerServer
from baton.scheduler.store.redis import RedisStore
from baton.scheduler.types import Attempt
from baton.security import identity as files
from baton.security.authority import Authority
from baton.security.names import Name, Role
from harness.scheduling import Options, RedisServer, identity, register, until
from harness.support import ROOT

TOPIC = f"acl-{uuid.uuid4().hex[:8]}"
PASSWORD = "open-sesame"
Serve = Callable[[str], str]


def rules() -> str:
    """Return the rules that the page gives, as one line of an ACL file."""
    page = (ROOT / "docs" / "security.md").read_text()
    found = re.search(r"```text\n(user baton .*?)\n```", page, re.DOTALL)
    assert found
    return " ".join(found[1].split()).replace("PASSWORD", PASSWORD).replace("TOPIC", TOPIC)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a Redis with these rules for the user baton, and nobody else; return the store's URL."""
    # A certificate of Baton's CA will do: its name is not an address, which the client is told not to check.
    authority = Authority.create(tmp_path / "ca")
    files.write(tmp_path, authority.issue(Name(TOPIC, Role.SCHEDULER)))
    running = []

    def start(acl: str) -> str:
        (tmp_path / "users.acl").write_text(f"user default off\n{acl}\n")
        extra = (
            *("--aclfile", str(tmp_path / "users.acl"), "--tls-auth-clients", "no"),
            *("--tls-cert-file", str(tmp_path / files.CHAIN), "--tls-key-file", str(tmp_path / files.KEY)),
            *("--tls-ca-cert-file", str(tmp_path / files.ROOTS)),
        )
        server = RedisServer(tmp_path, extra=extra, tls=True)
        server.start()
        running.append(server)
        trust = f"ssl_ca_certs={tmp_path / files.ROOTS}&ssl_check_hostname=False"
        return f"rediss://baton:{PASSWORD}@127.0.0.1:{server.port}/0?{trust}"

    yield start
    for server in running:
        server.stop()


async def test_the_rules_of_the_page_are_enough(serve: Serve) -> None:
    """All of a store's scripts run with them."""
    options = Options(store=serve(rules()), topic=TOPIC)
    async with SchedulerServer(options) as server, SchedulerClient(server.address, router_id="r") as client:
        await client.register(identity("w1"), pb.WORKER_STATE_READY)
        assert (await client.heartbeat("w1", pb.WORKER_STATE_READY, pb.WorkerLoad(), 0)).known
        await client.place("q", 1, prompt_tokens=10, max_new_tokens=5)
        await client.refresh()
        client.reporter.finished(Attempt("q", 1), "stop", pb.Cost())

        async def over() -> bool:
            return not (await client.describe()).attempts

        await until(over)
        assert (await client.drain("w1")).worker_id == "w1"
        assert (await client.undrain("w1")).name == "w1"
        await client.deregister("w1", 9)
        description = await client.describe()
        assert not description.store_problem
        assert len(description.handoffs) == 1
        assert await server._store.take_turn("test", 1)


async def test_the_rules_let_a_scheduler_write_its_memory_back(serve: Serve) -> None:
    store = RedisStore(serve(rules()), TOPIC)
    await register(store, "w1")
    state = await store.export()
    assert [worker.worker_id for worker in state.workers] == ["w1"]
    assert await store.merge(state) == store.generation
    await store.close()


@pytest.mark.parametrize(
    ("change", "topic"),
    [
        (("+evalsha ", ""), TOPIC),
        (("+hset ", ""), TOPIC),
        (("", ""), "another-topic"),
    ],
    ids=["no-scripts", "no-command-in-a-script", "anothers-keys"],
)
async def test_less_than_that_is_refused_and_told(serve: Serve, change: tuple[str, str], topic: str) -> None:
    store = RedisStore(serve(rules().replace(*change)), topic)
    with pytest.raises(StoreRefuses, match="does not allow this user enough") as error:
        await register(store, "w1")
    await store.close()
    assert "docs/security.md" in str(error.value)
    assert PASSWORD not in str(error.value)


async def test_a_wrong_password_is_told(serve: Serve) -> None:
    store = RedisStore(serve(rules()).replace(PASSWORD, "guess"), TOPIC)
    with pytest.raises(StoreRefuses, match="refused the password"):
        await register(store, "w1")
    await store.close()
