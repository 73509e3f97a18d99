"""Metrics over HTTP, and metrics of all processes."""

import contextlib
import itertools
import socket
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from prometheus_client import Counter, Histogram

from baton import addresses, metrics, rpc
from baton.metrics import LOOPBACK, SECONDS, CannotServe, MetricsServer
from harness.support import CALL_S, PATIENCE, eventually, free_port


def get(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def place():
    """Serve metrics; yield the host and port."""
    with MetricsServer(metrics.registry(), "worker.metrics_port", LOOPBACK, 0) as serving:
        yield addresses.split(serving.address)


def test_port_0_is_a_free_one_on_loopback():
    registry = metrics.registry()
    Counter("baton_test_things", "Things", registry=registry).inc(3)
    with MetricsServer(registry, "worker.metrics_port", "0.0.0.0:7401", 0) as serving:
        host, _, port = serving.address.rpartition(":")
        assert host == LOOPBACK
        assert int(port)
        assert serving.reached_at("10.0.0.7") == serving.address
        text = get(serving.address, "/metrics")
    assert "baton_test_things_total 3.0" in text
    assert "process_cpu_seconds_total" in text


def test_a_given_port_is_opened_on_the_processs_host():
    port = free_port()
    with MetricsServer(metrics.registry(), "worker.metrics_port", "0.0.0.0:7401", port) as serving:
        assert serving.address == f"0.0.0.0:{port}"
        assert serving.reached_at("10.0.0.7") == f"10.0.0.7:{port}"
        assert get(f"{LOOPBACK}:{port}", "/metrics")
        if socket.has_dualstack_ipv6():
            assert get(f"[::1]:{port}", "/metrics")
        with pytest.raises(CannotServe, match=rf"^worker\.metrics_port: .* 127\.0\.0\.1:{port}: .*in use"):
            MetricsServer(metrics.registry(), "worker.metrics_port", LOOPBACK, port).__enter__()


def test_a_host_of_another_machine():
    why = r"router\.metrics_port: metrics cannot be served on 192\.0\.2\.1:9402"
    with pytest.raises(CannotServe, match=why):
        MetricsServer(metrics.registry(), "router.metrics_port", "192.0.2.1", 9402).__enter__()


def test_other_pages():
    pages = {"/targets": lambda environment: environment["PATH_INFO"].encode()}
    with MetricsServer(metrics.registry(), "scheduler.metrics_port", LOOPBACK, 0, pages) as serving:
        assert get(serving.address, "/targets") == "/targets"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(serving.address, "/elsewhere")


def test_a_wildcard_is_dialled_at_an_address():
    host, _, port = metrics.dialled("0.0.0.0:7400").rpartition(":")
    assert (host != "0.0.0.0", port) == (True, "7400")
    assert metrics.dialled("10.0.0.7:7400") == "10.0.0.7:7400"


def test_the_life_of_a_certificate(monkeypatch):
    registry = metrics.registry()
    assert registry.get_sample_value("baton_certificate_left_seconds") is None
    begins = datetime.now(UTC)
    credentials = SimpleNamespace(begins=begins, ends=begins + timedelta(hours=1), seconds_left=lambda: 600.0)
    monkeypatch.setattr(rpc, "certificate", lambda: credentials)
    assert registry.get_sample_value("baton_certificate_left_seconds") == 600.0
    assert registry.get_sample_value("baton_certificate_life_seconds") == 3600.0


def test_the_buckets_reach_from_milliseconds_to_minutes():
    assert list(SECONDS) == sorted(set(SECONDS))
    assert SECONDS[0] <= 1e-3
    assert SECONDS[-1] >= 120
    assert all(above / below <= 3 for below, above in itertools.pairwise(SECONDS))
    registry = metrics.registry()
    Histogram("baton_test_seconds", "Time", buckets=SECONDS, registry=registry).observe(0.003)
    assert registry.get_sample_value("baton_test_seconds_bucket", {"le": "0.005"}) == 1


def test_a_slow_client_is_disconnected(place, monkeypatch):
    """The limit does not start again with each byte."""
    monkeypatch.setattr(metrics, "REQUEST_S", 0.5)
    with socket.create_connection(place, 10) as slow:
        slow.settimeout(0.1)
        began = time.monotonic()
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        while time.monotonic() - began < 10 * PATIENCE:
            try:
                slow.sendall(b"X: y\r\n")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - began < 5 * PATIENCE


@pytest.mark.parametrize("piece", [b"X: " + b"y" * 60_000 + b"\r\n", b"y" * 60_000], ids=["headers", "one"])
def test_endless_headers_are_limited(place, piece):
    sent = 0
    with socket.create_connection(place, 10) as client, contextlib.suppress(OSError):
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        for _ in range(90):
            client.sendall(piece)
            time.sleep(0.01)
            sent += len(piece)
    assert sent < 3 << 20


def test_concurrent_connections_are_limited(place):
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(place, CALL_S)) for _ in range(200)]
        held[-1].recv(1)  # it was closed
        assert threading.active_count() - before <= metrics.AT_ONCE

    def served():
        with contextlib.suppress(OSError):
            return "process_cpu_seconds_total" in get(addresses.join(*place), "/metrics")

    eventually(served, CALL_S, "it serves again")
