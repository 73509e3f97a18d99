"""The addresses at which others reach a worker."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from baton.addresses import join
from baton.services.config import load
from baton.services.errors import ConfigError, StartError
from baton.services.worker.advertise import Advertised, address_towards, advertised
from harness.support import PATIENCE, free_port

NOBODY = "127.0.0.1:1"
WAIT_S = 5 * PATIENCE


@asynccontextmanager
async def listening(host, port=0):
    """Accept connections, in place of a scheduler."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), host, port)
    async with server:
        yield join(host, server.sockets[0].getsockname()[1])


def settings(listen, advertise="", handoff_host="", scheduler=NOBODY):
    worker = {"listen": listen, "advertise": advertise}
    handoff = {"listen": join(handoff_host, 0) if handoff_host else ""}
    return load({"scheduler": {"address": scheduler}, "worker": worker, "handoff": handoff})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_local_address_of_a_connection_to_the_scheduler(host):
    async with listening(host) as scheduler:
        assert await address_towards(scheduler, WAIT_S) == host
        assert await address_towards(f"{NOBODY}, {scheduler}", WAIT_S) == host
        assert await address_towards(f"no-such-host.invalid:7400,{scheduler}", WAIT_S) == host


async def test_a_name_is_resolved():
    async with listening("127.0.0.1") as scheduler:
        assert await address_towards(scheduler.replace("127.0.0.1", "localhost"), WAIT_S) == "127.0.0.1"


async def test_waits_for_a_scheduler_that_starts_later():
    port = free_port()
    asking = asyncio.create_task(address_towards(f"127.0.0.1:{port}", WAIT_S))
    await asyncio.sleep(0)
    assert not asking.done()
    async with listening("127.0.0.1", port):
        assert await asking == "127.0.0.1"


@pytest.mark.parametrize("scheduler", [NOBODY, "no-such-host.invalid:7400", f"{NOBODY},[::1]:1"])
async def test_an_unreachable_scheduler_is_an_error_with_advice(scheduler):
    began = time.monotonic()
    with pytest.raises(StartError, match=r"worker\.advertise") as error:
        await address_towards(scheduler, 0.5)
    assert time.monotonic() - began < 10 * PATIENCE
    assert scheduler in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("listen", "handoff_host", "host", "worker"),
    [
        *((listen, "", "::1", "[::1]:7401") for listen in ("0.0.0.0:7401", "[::]:7401", ":::7401")),
        ("10.0.0.5:7401", "::", "127.0.0.1", "10.0.0.5:7401"),  # a wildcard for KV alone
    ],
)
async def test_a_wildcard_listener_advertises_its_own_address(listen, handoff_host, host, worker):
    async with listening(host) as scheduler:
        found = await advertised(settings(listen, "", handoff_host, scheduler), 7401, WAIT_S)
    assert found == Advertised(worker, host)


@pytest.mark.parametrize(
    ("listen", "advertise", "handoff_host", "worker", "kv_host"),
    [
        ("10.0.0.5:0", "", "", "10.0.0.5:7401", "10.0.0.5"),
        ("[fd00::5]:0", "", "", "[fd00::5]:7401", "fd00::5"),
        ("0.0.0.0:7401", "gate:17401", "", "gate:17401", "gate"),
        ("0.0.0.0:7401", "gate", "", "gate:7401", "gate"),
        ("0.0.0.0:7401", "gate:0", "", "gate:7401", "gate"),
        ("0.0.0.0:7401", "[fd00::5]", "", "[fd00::5]:7401", "fd00::5"),
        ("10.0.0.5:7401", "gate:17401", "", "gate:17401", "gate"),
        ("0.0.0.0:7401", "gate", "10.1.0.5", "gate:7401", "10.1.0.5"),  # KV on a network of its own
        ("10.0.0.5:7401", "gate", "0.0.0.0", "gate:7401", "gate"),
    ],
)
async def test_a_known_address_needs_no_scheduler(listen, advertise, handoff_host, worker, kv_host):
    found = await advertised(settings(listen, advertise, handoff_host), 7401, 0.2)
    assert found == Advertised(worker, kv_host)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("worker", "listen", "host:http", "host:port"),
        ("worker", "advertise", "0.0.0.0:7401", "others cannot connect to it"),
        ("worker", "advertise", "a:b:c", "host:port"),
        ("handoff", "listen", "10.0.0.5", "give host:port"),
    ],
)
def test_an_invalid_address_is_refused(section, key, value, said):
    with pytest.raises(ConfigError, match=f"{section}.{key}") as error:
        load({section: {key: value}})
    assert said in str(error.value)
