"""Declare Prometheus metrics, and serve them over HTTP.

Each process serves its registry at `/metrics`. Port 0 means a free port on loopback; another port is opened
on the host on which the process itself listens.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, ThreadingWSGIServer
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from baton import addresses, rpc
from baton.errors import BatonError

# Default buckets of durations, in seconds.
SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
METRICS = "/metrics"
LOOPBACK = "127.0.0.1"
AT_ONCE = 16  # connections, with a thread for each; more are closed
WAITING = 128  # backlog; with Python's 5, some connections of a burst are delayed by 1 or 3 s
REQUEST_S = 5.0  # limit for a client to send its request
ANSWER_S = 10.0  # limit for a client to read the answer: Prometheus' own timeout
MOST_REQUEST_BYTES = 64 << 10
# Unassigned addresses (RFC 5737, RFC 3849), to find the route to other machines.
_SOMEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))

Page = Callable[[Mapping[str, Any]], bytes]  # returns JSON for a WSGI environment


class _Row(NamedTuple):
    kind: type[Counter | Gauge | Histogram]
    text: str
    labels: tuple[str, ...]
    more: Mapping[str, Any] = MappingProxyType({})


def counter(text: str, *labels: str) -> Counter:
    """Declare a counter of a `Metrics` class."""
    return cast(Counter, _Row(Counter, text, labels))


def gauge(text: str, *labels: str) -> Gauge:
    return cast(Gauge, _Row(Gauge, text, labels))


def histogram(text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
    return cast(Histogram, _Row(Histogram, text, labels, {"buckets": buckets}))


class Metrics:
    """Metrics, declared as attributes of a subclass: `live_requests = gauge("Requests placed")`.

    A metric's name is the class's `prefix` and the attribute's name without leading underscores.
    """

    prefix: ClassVar[str]

    def __init__(self, registry: CollectorRegistry, **fixed: str) -> None:
        """Register the metrics. `fixed`: values of labels, bound in metrics that have no other labels."""
        for attribute, row in vars(type(self)).items():
            if isinstance(row, _Row):
                name = self.prefix + attribute.lstrip("_")
                made = row.kind(name, row.text, row.labels, registry=registry, **row.more)
                bound = row.labels and set(row.labels) <= set(fixed)
                values = (fixed[label] for label in row.labels if bound)
                setattr(self, attribute, made.labels(*values) if bound else made)

    def labelled(self, label: str) -> Iterator[Counter | Gauge | Histogram]:
        for attribute, row in vars(type(self)).items():
            if isinstance(row, _Row) and label in row.labels:
                yield getattr(self, attribute)


class CannotServe(BatonError):
    """The metrics port is taken, or its host is not this machine."""


class MetricsServer:
    """Serve a registry over HTTP, in a thread, while entered."""

    def __init__(
        self,
        registry: CollectorRegistry,
        key: str,
        listen: str,
        port: int,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        """Serve `registry` at /metrics and `pages` at their paths.

        key: the port's setting, for errors. listen: host or host:port on which the process itself listens.
        """
        self._registry = registry
        self._key = key
        self._host = addresses.split(listen)[0] if port else LOOPBACK
        self._port = port
        self._pages = pages or {}
        self._running: tuple[WSGIServer, threading.Thread] | None = None

    @property
    def address(self) -> str:
        """The host:port, with the actual port once entered."""
        port = self._running[0].server_port if self._running else self._port
        return addresses.join(self._host, port)

    def reached_at(self, host: str) -> str:
        """Return host:port for other machines, which reach this process at `host`."""
        _, port = addresses.split(self.address)
        return addresses.join(host if self._port else self._host, port)

    def __enter__(self) -> Self:
        """Start serving. Raises CannotServe."""
        # Listen like gRPC: others may know a worker by an IPv6 address although it listens on 0.0.0.0.
        both = addresses.is_wildcard(self._host) and socket.has_dualstack_ipv6()
        host = "::" if both else self._host
        try:
            family = socket.getaddrinfo(host, self._port, type=socket.SOCK_STREAM)[0][0]
            server = make_server(host, self._port, self._app(), _server(family), handler_class=_Quiet)
        except OSError as error:
            raise CannotServe(
                f"{self._key}: metrics cannot be served on {self.address}: {error.strerror or error}; "
                "choose another port, or 0 for a free one on loopback"
            ) from None
        thread = threading.Thread(target=server.serve_forever, name="baton-metrics", daemon=True)
        thread.start()
        self._running = server, thread
        return self

    def __exit__(self, *error: object) -> None:
        if self._running:
            server, thread = self._running
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)
            self._running = None

    def _app(self) -> Callable[..., Any]:
        def app(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
            path = environment.get("PATH_INFO", "")
            if environment["REQUEST_METHOD"] != "GET" or path not in (METRICS, *self._pages):
                start("404 Not Found", [("Content-Type", "text/plain")])
                return [f"GET {' or '.join((METRICS, *self._pages))}\n".encode()]
            if page := self._pages.get(path):
                text, kind = page(environment), "application/json"
            else:
                text, kind = exposition(self._registry, environment.get("HTTP_ACCEPT", ""))
            start("200 OK", [("Content-Type", kind)])
            return [text]

        return app


class ProcessFigures(Collector):
    """The remaining and the total life of this process's certificate, if it has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        left, life = self._families()
        if credentials := rpc.certificate():
            left.add_metric([], credentials.seconds_left())
            life.add_metric([], (credentials.ends - credentials.begins).total_seconds())
        yield left
        yield life

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily(
                "baton_certificate_left_seconds", "Time until this process's certificate expires"
            ),
            GaugeMetricFamily("baton_certificate_life_seconds", "Time for which it was issued"),
        )


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return a registry in the format that a client accepts, and its content type.

    For a Prometheus before version 3, prometheus_client would choose an escaping that replaces the colons in
    the names of vLLM's metrics.
    """
    if "application/openmetrics-text" in accept:
        text: bytes = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def registry() -> CollectorRegistry:
    """Return a registry with the metrics that every process has: CPU, memory, files, certificate."""
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    ProcessFigures(made)
    return made


def dialled(address: str) -> str:
    """Return host:port as other machines dial it: a wildcard becomes this machine's address."""
    host, port = addresses.split(address)
    return addresses.join(way_out() if addresses.is_wildcard(host) else host, port)


def way_out() -> str:
    """Return this machine's address towards other machines, or that of its host name. Sends nothing."""
    for family, somewhere in _SOMEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((somewhere, 9))
                return str(probe.getsockname()[0])
        except OSError:  # no route, or not for this address family
            continue
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


class _Request(io.RawIOBase):
    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._left = MOST_REQUEST_BYTES
        self._ends = time.monotonic() + REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._ends - time.monotonic()
        if seconds <= 0 or self._left <= 0:
            raise TimeoutError
        self._client.settimeout(seconds)
        got = self._client.recv_into(buffer)
        self._left -= got
        self._client.settimeout(ANSWER_S)
        return got


class _Quiet(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client was too slow, sent too much, or left
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """Do not log every scrape."""


def _server(family: socket.AddressFamily) -> type[WSGIServer]:
    class Server(ThreadingWSGIServer):
        address_family = family
        request_queue_size = WAITING

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._room = threading.Semaphore(AT_ONCE)

        def process_request(self, request: Any, client_address: Any) -> None:
            if not self._room.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no thread can be started
                self._room.release()
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self._room.release()

        def server_bind(self) -> None:
            if family == socket.AF_INET6:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            super().server_bind()

    return Server
