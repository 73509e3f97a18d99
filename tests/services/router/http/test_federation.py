import asyncio
import socket
import time
from contextlib import contextmanager

import httpx
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.testclient import TestClient

from baton import rpc
from baton.metrics import MetricsServer
from baton.scheduler.members import Member
from baton.services.router.http import federation
from baton.services.router.http.federation import Federation, Processes, merged, route
from harness.serving import serving

ME = Member("router-1", "router", rpc.host_id(), "127.0.0.1:1")


def parsed(text):
    """Return the samples. Raises if the text is invalid or a family is in two pieces."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({one.name for one in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    return {key(sample.name, **sample.labels): sample.value for sample in samples}


def key(name, **labels):
    return name, tuple(sorted(labels.items()))


def things(value):
    registry = CollectorRegistry()
    Counter("baton_things", "Things", ["kind"], registry=registry).labels('odd "one"').inc(value)
    Gauge("baton_workers", "Workers", ["role"], registry=registry).labels("decode").set(value)
    return registry


@contextmanager
def hanging():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def answering(status, body):
    async def answer(_):
        return web.Response(status=status, body=body)

    return serving(answer)


def there(name, address):
    return Member(name, "decode", rpc.host_id(), address)


async def test_samples_get_their_processes_labels():
    with MetricsServer(things(2), "worker.metrics_port", "127.0.0.1", 0) as worker:
        found = parsed(await Federation(ME, things(1), lambda: [ME, there("d.1", worker.address)]).collect())
    assert found[key("baton_things_total", kind='odd "one"', instance="router-1", role="router")] == 1
    assert found[key("baton_things_total", kind='odd "one"', instance="d.1", role="decode")] == 2
    # a sample's own label `role` stays
    assert found[key("baton_workers", instance="router-1", role="decode")] == 1
    assert found[key("baton_federation_up", instance="router-1", role="router")] == 1
    assert found[key("baton_federation_up", instance="d.1", role="decode")] == 1


async def test_a_text_may_arrive_in_pieces():
    body = b"".join(b'baton_many{number="%d"} 1\n' % number for number in range(10_000))
    async with answering(200, b"# TYPE baton_many gauge\n" + body) as address:
        found = parsed(await Federation(ME, things(1), lambda: [there("d.1", address)]).collect())
    assert sum(name == "baton_many" for name, _ in found) == 10_000


async def test_processes_that_do_not_answer_have_a_sample(monkeypatch):
    monkeypatch.setattr(federation, "ASK_S", 0.3)
    monkeypatch.setattr(federation, "MOST_BYTES", 1000)
    with hanging() as closed:
        pass
    async with answering(500, b"no") as broken, answering(200, b"x 1\n" * 1000) as large:
        with hanging() as hangs:
            others = [
                there("hangs", hangs),
                there("broken", broken),
                there("large", large),
                there("closed", closed),
                Member("elsewhere", "decode", "another host", large),  # its own loopback
                Member("silent", "prefill", rpc.host_id(), ""),
                there("garbled", "here:or there"),
                Member("garbled there", "decode", "another host", "here:or there"),
            ]
            found = parsed(await Federation(ME, things(1), lambda: others).collect())
    up = {dict(labels)["instance"]: value for (name, labels), value in found.items() if name == federation.UP}
    assert up == {"router-1": 1, **{one.id: 0 for one in others}}


async def test_the_time_is_bounded_however_many_hang(monkeypatch):
    monkeypatch.setattr(federation, "AT_ONCE", 2)
    monkeypatch.setattr(federation, "ASK_S", 0.5)
    monkeypatch.setattr(federation, "ALL_S", 1.0)
    with hanging() as address:
        began = time.monotonic()
        others = [there(f"w{number}", address) for number in range(100)]
        found = parsed(await Federation(ME, things(1), lambda: others).collect())
        assert time.monotonic() - began < 20  # one after the other: 25 s
    assert sum(name == federation.UP for name, _ in found) == 101


async def test_concurrent_callers_share_an_answer():
    asked = 0

    def members():
        nonlocal asked
        asked += 1
        return []

    both = Federation(ME, things(1), members)
    first, second = await asyncio.gather(both.collect(), both.collect())
    assert first == second
    assert asked == 1
    await both.collect()
    assert asked == 2


def test_the_route_has_all_metrics_only_with_the_query():
    registry = things(1)
    Counter("vllm:tokens", "Tokens", registry=registry).inc(7)
    with TestClient(Starlette(routes=[route(Federation(ME, registry, list))])) as client:
        assert 'vllm:tokens_total{instance="router-1",role="router"} 7.0' in client.get("/metrics?all").text
        for query in ("", "?almost=all"):
            assert "vllm:tokens_total 7.0" in client.get(f"/metrics{query}").text


async def test_processes_of_one_router_answer_for_all():
    formats = {
        "": text_string_to_metric_families,
        "application/openmetrics-text;version=1.0.0": openmetrics_families,
    }
    with MetricsServer(things(2), "router.metrics_port", "127.0.0.1", 0) as other, hanging() as hangs:
        addresses = {0: "127.0.0.1:1", 1: other.address, 2: hangs}
        collecting = Federation(ME, things(1), list, Processes(0, lambda: addresses))
        transport = httpx.ASGITransport(Starlette(routes=[route(collecting)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            asked = [client.get("/metrics", headers={"Accept": accept}) for accept in formats]
            answers = await asyncio.gather(*asked)
    for answer, parse in zip(answers, formats.values(), strict=True):
        samples = [sample for family in parse(answer.text) for sample in family.samples]
        found = {key(sample.name, **sample.labels): sample.value for sample in samples}
        name = "baton_things_total"
        assert found[key(name, kind='odd "one"', process="0")] == 1
        assert found[key(name, kind='odd "one"', process="1")] == 2
        up = {one.labels["process"]: one.value for one in samples if one.name == federation.PROCESS_UP}
        assert up == {"0": 1, "1": 1, "2": 0}


@pytest.mark.parametrize("escaping", ["", ";escaping=allow-utf-8", ";escaping=underscores"])
def test_names_with_a_colon_are_the_same_in_every_format(escaping):
    """prometheus_client alone would make vllm_tokens_total of it."""
    registry = CollectorRegistry()
    Counter("vllm:tokens", "Tokens", registry=registry).inc(7)
    accept = f"application/openmetrics-text;version=1.0.0{escaping},text/plain;version=0.0.4;q=0.5"
    with TestClient(Starlette(routes=[route(Federation(ME, registry, list))])) as client:
        answer = client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert "vllm:tokens_total 7.0" in answer.text
    assert answer.text.endswith("# EOF\n")


def test_odd_label_values_are_kept():
    odd = b'# HELP a A\n# TYPE a gauge\na{b="}, role=\\"x\\" {",c="1"} NaN\na 2 1700000000000'
    text = merged([({"instance": "i"}, odd)], "up").decode()
    assert 'a{instance="i",b="}, role=\\"x\\" {",c="1"} NaN\n' in text
    assert 'a{instance="i"} 2 1700000000000\n' in text
    assert len(list(text_string_to_metric_families(text))) == 2
