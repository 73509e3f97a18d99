"""Encode vLLM's own request and output structs as bytes in our gRPC messages, and decode them.

The structs are positional msgpack, so both ends must run the same vLLM; they compare versions when they
connect. vLLM's encoder would put large arrays into separate frames, which a protobuf bytes field cannot hold,
so every array is sent inline. All functions may be called from any thread.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

PROTOCOL = 6  # version of router-worker streams; raise it for changes that the other side cannot read
_ALWAYS_INLINE = 1 << 62  # bytes, more than any array has


class _Codecs(threading.local):
    """The coders of one thread. vLLM's coders keep a message's buffers in the object while they work."""

    def __init__(self) -> None:
        self.encoder = MsgpackEncoder(size_threshold=_ALWAYS_INLINE)
        self.request = MsgpackDecoder(EngineCoreRequest)
        self.outputs = MsgpackDecoder(EngineCoreOutputs)


_codecs = _Codecs()


def encode_request(request: EngineCoreRequest) -> bytes:
    return _encode(request)


def decode_request(data: bytes) -> EngineCoreRequest:
    """Decode a request. Raises ValueError."""
    return _decode(_codecs.request, data, "EngineCoreRequest")


def encode_outputs(outputs: EngineCoreOutputs) -> bytes:
    return _encode(outputs)


def decode_outputs(data: bytes) -> EngineCoreOutputs:
    """Decode the outputs of a step. Raises ValueError."""
    return _decode(_codecs.outputs, data, "EngineCoreOutputs")


def _encode(message: Any) -> bytes:
    frames = _codecs.encoder.encode(message)
    if len(frames) != 1:
        raise ValueError(f"{type(message).__name__} needs {len(frames)} frames: is a GPU tensor in it?")
    return bytes(frames[0])


def _decode(decoder: MsgpackDecoder, data: bytes, name: str) -> Any:
    try:
        return decoder.decode(bytearray(data))  # a copy, because torch needs writable memory
    except (msgspec.MsgspecError, NotImplementedError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{len(data)} bytes hold no {name} that this vLLM can read: {error}") from None
