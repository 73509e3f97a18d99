"""Encode vLLM's own request and output structs as bytes in our gRPC messages, and decode them.

The structs are positional msgpack, so both ends must run the same vLLM (they compare versions when they
meet). Each message is one frame: vLLM's encoder would put large arrays into frames of their own, which a
protobuf field of bytes cannot keep apart, so every array is sent inline.

Leans on: vllm.v1.serial_utils.{MsgpackEncoder, MsgpackDecoder} (size_threshold, single-frame decode),
vllm.v1.engine.{EngineCoreRequest, EngineCoreOutputs}.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

PROTOCOL = 5  # version of router-worker streams: raise it for changes the other side cannot read
_ALWAYS_INLINE = 1 << 62  # bytes: above any array, so that every array stays in the frame


class _Codecs(threading.local):
    """One set of coders per thread: vLLM's keep a message's buffers in the object while they work."""

    def __init__(self) -> None:
        self.encoder = MsgpackEncoder(size_threshold=_ALWAYS_INLINE)
        self.request = MsgpackDecoder(EngineCoreRequest)
        self.outputs = MsgpackDecoder(EngineCoreOutputs)


_codecs = _Codecs()


def encode_request(request: EngineCoreRequest) -> bytes:
    """Encode one request as one frame. Any thread."""
    return _encode(request)


def decode_request(data: bytes) -> EngineCoreRequest:
    """Decode the request in `data`. Any thread. Raises ValueError if `data` is not one."""
    return _decode(_codecs.request, data, "EngineCoreRequest")


def encode_outputs(outputs: EngineCoreOutputs) -> bytes:
    """Encode the outputs of one step as one frame. Any thread."""
    return _encode(outputs)


def decode_outputs(data: bytes) -> EngineCoreOutputs:
    """Decode the outputs in `data`. Any thread. Raises ValueError if `data` holds none."""
    return _decode(_codecs.outputs, data, "EngineCoreOutputs")


def _encode(message: Any) -> bytes:
    frames = _codecs.encoder.encode(message)
    if len(frames) != 1:
        raise ValueError(f"{type(message).__name__} needs {len(frames)} frames: is a GPU tensor in it?")
    return bytes(frames[0])


def _decode(decoder: MsgpackDecoder, data: bytes, name: str) -> Any:
    try:
        return decoder.decode(bytearray(data))  # a copy: torch wants writable memory under its tensors
    except (msgspec.MsgspecError, NotImplementedError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{len(data)} bytes hold no {name} that this vLLM can read: {error}") from None
