"""Encode vLLM's own request and output structs as bytes in our gRPC messages, and decode them.

The structs are positional msgpack, so both ends must run the same vLLM. Arrays are sent inline, except
the large arrays of images, which become frames that are sent in pieces, without a copy:

    number of frames, u64; the length of each, u64; the frames, each at a multiple of 16 bytes

All functions may be called from any thread.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

PROTOCOL = 8  # version of router-worker streams; raise it for changes that the other side cannot read
# What vLLM's decoder raises for the wrong content, e.g. for a tensor with fewer bytes than its shape needs.
_UNREADABLE = (NotImplementedError, TypeError, ValueError, AttributeError, LookupError, RuntimeError)
_ALWAYS_INLINE = 1 << 62  # bytes, more than any array has
_FRAME_BYTES = 4096  # smaller arrays of images are sent inline
_PIECE_BYTES = 4 << 20  # takes a millisecond to copy
_ALIGNED = 16


class _Codecs(threading.local):
    """The coders of one thread. vLLM's coders keep a message's buffers in the object while they work."""

    def __init__(self) -> None:
        self.encoder = MsgpackEncoder(size_threshold=_ALWAYS_INLINE)
        self.images = MsgpackEncoder(size_threshold=_FRAME_BYTES)
        self.request = MsgpackDecoder(EngineCoreRequest)
        self.outputs = MsgpackDecoder(EngineCoreOutputs)
        self.item = MsgpackDecoder(MultiModalKwargsItem)


_codecs = _Codecs()


def new_request(request_id: str, prompt: list[int], params: Any, **fields: Any) -> EngineCoreRequest:
    """Return a request of a text. vLLM's struct has no defaults for the fields that are None here."""
    needless = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    given = dict.fromkeys(needless) | {"arrival_time": time.time()} | fields
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, **given)


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


def encode_item(item: MultiModalKwargsItem) -> Iterator[bytes | memoryview]:
    """Encode a prepared image as pieces of at most 4 MiB to be joined. They share its tensors' memory."""
    frames = [memoryview(one).cast("B") for one in _codecs.images.encode(item)]
    frames.insert(0, memoryview(struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames))))
    for frame in frames:
        for begin in range(0, len(frame), _PIECE_BYTES):
            yield frame[begin : begin + _PIECE_BYTES]
        yield bytes(-len(frame) % _ALIGNED)


def decode_item(data: bytearray) -> MultiModalKwargsItem:
    """Decode a prepared image, whose large tensors will share memory with `data`. Raises ValueError."""
    return _decode(_codecs.item, data, "MultiModalKwargsItem", _frames)


def _frames(data: bytearray) -> list[memoryview]:
    (number,) = struct.unpack_from("<Q", data)
    if number > len(data) >> 3:
        raise ValueError("its frames are cut")
    lengths = struct.unpack_from(f"<{number}Q", data, 8)
    found, end = [], 8 * (1 + number)
    for length in lengths:
        begin = end + -end % _ALIGNED
        end = begin + length
        found.append(memoryview(data)[begin:end])
    if end + -end % _ALIGNED != len(data):
        raise ValueError("its frames have other lengths")
    return found


def _encode(message: Any) -> bytes:
    frames = _codecs.encoder.encode(message)
    if len(frames) != 1:
        raise ValueError(f"{type(message).__name__} needs {len(frames)} frames: is a GPU tensor in it?")
    return bytes(frames[0])


def _decode(
    decoder: MsgpackDecoder,
    data: bytes | bytearray,
    name: str,
    frames: Callable[[bytearray], Any] = lambda whole: whole,
) -> Any:
    try:
        writable = data if isinstance(data, bytearray) else bytearray(data)  # torch needs a writable buffer
        return decoder.decode(frames(writable))
    except (struct.error, msgspec.MsgspecError, *_UNREADABLE) as error:
        raise ValueError(f"{len(data)} bytes hold no {name} that this vLLM can read: {error}") from None
