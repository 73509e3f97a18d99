"""All gRPC servers and channels of Baton: limits, keepalive, deadlines and TLS.

A process has an identity (`act_as`) or speaks plain text. With an identity, clients verify the server's role,
and servers look up each call (security/interceptors.py). New connections use a renewed certificate: servers
read it at each handshake, and clients make new channels (`Line`).
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton import addresses
from baton.security import exposure
from baton.security.names import Role, host_of

if TYPE_CHECKING:  # plain text needs no cryptography
    from baton.security.identity import Credentials, Identity

MAX_MESSAGE_BYTES = 64 << 20  # a 128 k-token prompt is 0.5 MB, a handoff's chunk 4 MB
KEEPALIVE_MS = 5_000  # a peer whose machine is lost is noticed within this plus the timeout
KEEPALIVE_TIMEOUT_MS = 5_000
CALL_TIMEOUT_S = 5.0  # default deadline of a unary call
HANDSHAKE_MS = 10_000  # limit for a new connection's handshake; gRPC's default is two minutes
RETIRED_S = 30.0  # limit for calls on a channel whose certificate was replaced

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # gRPC 1.8x uses this, a minute by default, in place of keepalive_timeout_ms.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    # Ignore proxies named in the environment.
    ("grpc.enable_http_proxy", 0),
    # A restarted peer is back in seconds, and the default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A replaced peer, such as a pod, may have another address. gRPC's default is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
# gRPC's text for a failed handshake -> its meaning
_TLS_PROBLEMS = {
    "WRONG_VERSION_NUMBER": "it speaks plain text, and this process TLS (security.tls)",
    "Hostname Verification Check failed": "its certificate is for another role or topic",
    "CERTIFICATE_VERIFY_FAILED": "its certificate has expired, or is not from this process's CA",
}
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    # Otherwise a second server on the port would get half of the calls, instead of failing to bind.
    ("grpc.so_reuseport", 0),
]


@dataclass
class _Process:
    identity: Identity | None = None
    insecure: bool = False


_process = _Process()


def act_as(identity: Identity | None, *, insecure: bool = False) -> None:
    """Set the identity for all further servers and channels; None: plain text.

    insecure: servers may accept plain text from other machines.
    """
    _process.identity, _process.insecure = identity, insecure


def identity_folder() -> Path | None:
    """Return the folder of this process's identity, for child processes; None in plain text."""
    mine = _process.identity
    return mine.folder if mine else None


def is_open() -> bool:
    """Return whether this process may accept plain text from other machines."""
    return _process.identity is None and _process.insecure


def certificate() -> Credentials | None:
    """Return this process's current certificate; None in plain text."""
    return _process.identity.current() if _process.identity else None


def check_exposure(key: str, host: str) -> None:
    """Raise NotSecured for a host on which this process must not listen; `key`: its setting."""
    if not _process.identity and not _process.insecure:
        exposure.check(key, host)


# ---- servers


def aio_server() -> grpc.aio.Server:
    """Return an asyncio server that enforces the table of roles."""
    mine = _process.identity
    if mine is None:
        return grpc.aio.server(options=SERVER_OPTIONS)
    from baton.security.interceptors import AioGuard

    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=[AioGuard(mine.name.topic)])


def server(pool: ThreadPoolExecutor, max_calls: int) -> grpc.Server:
    """Return a threaded server that enforces the table of roles, and refuses calls beyond `max_calls`."""
    mine = _process.identity
    interceptors: list[grpc.ServerInterceptor[Any, Any]] = []
    if mine is not None:
        from baton.security.interceptors import Guard

        interceptors = [Guard(mine.name.topic)]
    return grpc.server(
        pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_calls, interceptors=interceptors
    )


def listen(server: grpc.Server | grpc.aio.Server, key: str, address: str) -> int:
    """Let a server listen on host:port; return its actual port, or 0 if that fails.

    Raises NotSecured if other machines could reach it in plain text; `key`: the address's setting.
    """
    host, _ = addresses.split(address)
    check_exposure(key, host)
    mine = _process.identity
    try:
        if mine is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _server_credentials(mine)))
    except RuntimeError:
        return 0


def _server_credentials(mine: Identity) -> grpc.ServerCredentials:
    """Return credentials that use the identity's current certificate at each handshake."""
    last = mine.current()

    def fetch() -> Any:
        nonlocal last
        now = mine.current()
        if now is last:
            return None  # unchanged
        last = now
        return _server_certificate(now)

    return grpc.dynamic_ssl_server_credentials(
        _server_certificate(last), fetch, require_client_authentication=True
    )


def _server_certificate(credentials: Credentials) -> Any:
    pems = credentials.pems
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], root_certificates=pems.roots)


# ---- channels


class Dialler:
    """Make channels to processes of one role, with the identity that this process has now."""

    def __init__(self, to: Role) -> None:
        self._to = to
        self._mine = _process.identity

    @property
    def credentials(self) -> Credentials | None:
        """The current credentials; a new object if they have changed."""
        return self._mine.current() if self._mine else None

    def channel(self, address: str) -> grpc.Channel:
        """Return a channel to host:port; it connects on first use, and reconnects."""
        if self._mine is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, self._channel_credentials(self._mine), self._options(self._mine))

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        if self._mine is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(
            address, self._channel_credentials(self._mine), self._options(self._mine)
        )

    def _options(self, mine: Identity) -> list[tuple[str, Any]]:
        # Certificates do not contain addresses, which are unknown at first and may change.
        return [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", host_of(mine.name.topic, self._to))]

    @staticmethod
    def _channel_credentials(mine: Identity) -> grpc.ChannelCredentials:
        pems = mine.current().pems
        return grpc.ssl_channel_credentials(pems.roots, pems.key, pems.chain)


def aio_channel(address: str, to: Role) -> grpc.aio.Channel:
    """Return an asyncio channel to host:port, for short use: a `Line` survives a renewed certificate."""
    return Dialler(to).aio_channel(address)


def tls_problem(details: str) -> str:
    """Explain gRPC's error text if TLS may be the reason; otherwise return an empty string."""
    if "Socket closed" in details:  # a server that rejects a certificate gives no reason
        return _hung_up(_process.identity)
    return next((meaning for word, meaning in _TLS_PROBLEMS.items() if word in details), "")


def _hung_up(mine: Identity | None) -> str:
    if mine is None:
        return "it hung up; if it speaks TLS, this process needs security.tls, too"
    if mine.current().seconds_left() <= 0:
        return "it hung up: this process's certificate has expired; restart it to get a new one"
    return "it hung up: it ended, or this process's certificate is not from its CA"


class Line:
    """An asyncio channel to one address, replaced when the certificate is renewed."""

    def __init__(self, address: str, to: Role) -> None:
        self._address = address
        self._dialler = Dialler(to)
        self._credentials = self._dialler.credentials
        self._channel = self._dialler.aio_channel(address)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for the next call. Calls on a replaced one may finish within `RETIRED_S`."""
        now = self._dialler.credentials
        if now is not self._credentials:
            closing = asyncio.ensure_future(self._channel.close(RETIRED_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._credentials, self._channel = now, self._dialler.aio_channel(self._address)
        return self._channel

    async def close(self) -> None:
        for closing in self._closing:
            closing.cancel()
        await self._channel.close(None)


def host_id() -> str:
    """Return an id that processes have in common if they can share memory: boot id and /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shm = Path("/dev/shm")  # noqa: S108
    boot_id = boot.read_text().strip() if boot.exists() else socket.gethostname()
    device = f"{shm.stat().st_dev}-{shm.stat().st_ino}" if shm.exists() else "none"
    return f"{boot_id}/{device}"
