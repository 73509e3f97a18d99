"""The settings of every gRPC connection in Baton: limits, keepalive, deadlines."""

import socket
from pathlib import Path

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 << 20  # a 128 k-token prompt is 0.5 MB, a handoff's chunk 4 MB
KEEPALIVE_MS = 5_000  # a peer whose machine vanished is noticed within this plus the timeout
KEEPALIVE_TIMEOUT_MS = 5_000
CALL_TIMEOUT_S = 5.0  # default deadline of a unary call

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # gRPC 1.8x waits this long for the reply to a keepalive ping, a minute by default, not as long as above.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    # Reconnect quickly: a restarted peer is back in seconds; the default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would each get half of the calls: the second must fail to bind.
    ("grpc.so_reuseport", 0),
]


def aio_channel(address: str) -> grpc.aio.Channel:
    """Return an asyncio channel to `address` (host:port), which connects lazily and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def host_id() -> str:
    """Return an id that is equal in processes that can share memory: the boot id and their /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shm = Path("/dev/shm")  # noqa: S108
    boot_id = boot.read_text().strip() if boot.exists() else socket.gethostname()
    device = f"{shm.stat().st_dev}-{shm.stat().st_ino}" if shm.exists() else "none"
    return f"{boot_id}/{device}"
