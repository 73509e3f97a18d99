"""Clients that leave at any byte of their request or of the answer."""

import json
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

from harness.deployment import MODEL_NAME

TIMEOUT_S = 20.0
How = Literal["close", "reset", "half"]
BODIES = [
    ("/v1/completions", {"prompt": "Hi there", "max_tokens": 40, "ignore_eos": True, "stream": True}),
    ("/v1/completions", {"prompt": ["Hi", "there"], "n": 2, "max_tokens": 20, "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "stream": True},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}),
    ("/v1/completions", {"prompt": 7}),
]


@dataclass(frozen=True)
class Cut:
    """A client that leaves after `sent` bytes of its request, or `read` bytes of the answer."""

    request: bytes
    sent: int
    read: int
    how: How


@st.composite
def cuts(draw):
    path, body = draw(st.sampled_from(BODIES))
    request = written(path, body, chunked=draw(st.booleans())) * draw(st.sampled_from([1, 1, 1, 2]))
    whole = draw(st.booleans())
    sent = len(request) if whole else draw(st.integers(0, len(request)))
    read = draw(st.integers(0, 4000)) if whole else 0
    return Cut(request, sent, read, draw(st.sampled_from(["close", "reset", "half"])))


def written(path, body, *, chunked):
    data = json.dumps({"model": MODEL_NAME, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    if not chunked:
        return head + b"Content-Length: %d\r\n\r\n" % len(data) + data
    pieces = [data[at : at + 50] for at in range(0, len(data), 50)]
    return (
        head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        + b"0\r\n\r\n"
    )


def perform(cut, port):
    """Send and read as much as the cut says; return what was read."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        try:
            client.sendall(cut.request[: cut.sent])
            while len(got) < cut.read and not got.endswith(b"0\r\n\r\n") and not _whole(got):
                piece = client.recv(min(4096, cut.read - len(got)))
                if not piece:
                    break
                got += piece
            if cut.how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif cut.how == "half":
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass
        except ConnectionError:
            pass  # the router may close the connection first
    return got


def _whole(got):
    head, found, body = got.partition(b"\r\n\r\n")
    if not found or b"content-length: " not in head:
        return False
    return len(body) >= int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
