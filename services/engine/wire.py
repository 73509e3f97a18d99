"""Encode vLLM's own request and output structs as bytes in our gRPC messages, and decode them.

The structs are positional msgpack, so both ends must run the same vLLM; they compare versions when they
connect. vLLM's encoder would put large arrays into separate frames, which a protobuf bytes field cannot hold,
so every array is sent inline. All functions may be called from any thread.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

PROTOCOL = 7  # version of router-worker streams; raise it for changes that the other side cannot read
# What vLLM's decoder raises for the wrong content, e.g. for a tensor with fewer bytes than its shape needs.
_UNREADABLE = (NotImplementedError, TypeError, ValueError, AttributeError, LookupError, RuntimeError)
_ALWAYS_INLINE = 1 << 62  # bytes, more than any array has


class _Codecs(threading.local):
    """The coders of one thread. vLLM's coders keep a message's buffers in the object while they work."""

    def __init__(self) -> None:
        self.encoder = MsgpackEncoder(size_threshold=_ALWAYS_INLINE)
        self.request = MsgpackDecoder(EngineCoreRequest)
        self.outputs = MsgpackDecoder(EngineCoreOutputs)
        self.item = MsgpackDecoder(MultiModalKwargsItem)


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


def encode_item(item: MultiModalKwargsItem) -> bytes:
    """Encode a prepared image."""
    return _encode(item)


def decode_item(data: bytearray) -> MultiModalKwargsItem:
    """Decode a prepared image, whose tensors will share memory with `data`. Raises ValueError."""
    return _decode(_codecs.item, data, "MultiModalKwargsItem")


def _encode(message: Any) -> bytes:
    frames = _codecs.encoder.encode(message)
    if len(frames) != 1:
        raise ValueError(f"{type(message).__name__} needs {len(frames)} frames: is a GPU tensor in it?")
    return bytes(frames[0])


def _decode(decoder: MsgpackDecoder, data: bytes | bytearray, name: str) -> Any:
    try:
        # torch needs writable memory
        return decoder.decode(data if isinstance(data, bytearray) else bytearray(data))
    except (msgspec.MsgspecError, *_UNREADABLE) as error:
        raise ValueError(f"{len(data)} bytes hold no {name} that this vLLM can read: {error}") from None
