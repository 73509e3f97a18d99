"""gRPC: the source's Handoff service streams records, in messages of a size that suits the puller."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import grpc
import numpy as np

from baton.handoff import wire
from baton.handoff.channels import Channels
from baton.handoff.errors import HandoffError, PullTimeout, TransportFailed, named
from baton.handoff.records import Records
from baton.handoff.transports.base import Pull, SavedShard, Transport
from baton.handoff.wire import ERROR_KEY, PULL, SERVICE
from baton.protos.handoff_pb2 import PullRequest, Shard


class Grpc(Transport):
    """Streams from the source's Handoff service, which every rank runs at its shards' address."""

    name: ClassVar[str] = "grpc"
    windows: ClassVar[bool] = True

    def __init__(self, message_bytes: int = wire.MESSAGE_BYTES) -> None:
        """message_bytes: of records in a message, at most; 0: whole ones, as many as the source likes."""
        self._message_bytes = message_bytes
        self._channels = Channels()

    def offer(self, saved: SavedShard) -> bytes:
        del saved
        return b""  # the shard's address says all

    def reaches(self, shard: Shard) -> bool:
        return self.name in shard.offers and bool(shard.address)

    def pull(self, pull: Pull) -> Iterator[Records]:
        start = self._channels.to(pull.shard.address).unary_stream(
            f"/{SERVICE}/{PULL}",
            request_serializer=PullRequest.SerializeToString,
            response_deserializer=wire.decode,
        )
        request = PullRequest(
            request_id=pull.request_id,
            epoch=pull.epoch,
            rank=pull.shard.rank,
            first_block=pull.first_block,
            num_blocks=pull.num_blocks,
            ticket=pull.shard.ticket,
            message_bytes=self._message_bytes,
        )
        pull.check_time()
        stream: Any = start(request, timeout=pull.deadline - time.monotonic())
        pull.cancellation.call(stream.cancel)
        expected, stop = pull.first_block, pull.first_block + pull.num_blocks
        try:
            for chunk in _whole(pull, stream):
                records = self._records(pull, chunk, expected, stop)
                yield records
                expected += len(records.data)
                pull.check_time()
        except grpc.RpcError as error:
            raise self._translate(pull, error) from None
        finally:
            stream.cancel()
        if expected != stop:
            raise TransportFailed(f"{pull.what}: the stream ended after block {expected} of {stop}")

    def close(self) -> None:
        self._channels.close()

    @staticmethod
    def _records(pull: Pull, chunk: wire.RawChunk, expected: int, stop: int) -> Records:
        count, rest = divmod(chunk.records.size, pull.record_bytes)
        whole = rest == 0 and len(chunk.digests) == count and 0 < count <= stop - expected
        if chunk.first_block != expected or not whole:
            raise TransportFailed(
                f"{pull.what}: {chunk.records.size} bytes from block {chunk.first_block} on came with"
                f" {len(chunk.digests)} digests; wanted: whole records of {pull.record_bytes} bytes, blocks"
                f" {expected} to {stop}"
            )
        return Records(expected, chunk.records.reshape(count, pull.record_bytes), chunk.digests)

    @staticmethod
    def _translate(pull: Pull, error: grpc.RpcError) -> HandoffError:
        """Return the source's own error, by its name; otherwise one for how the call ended."""
        pull.check_time()
        trailing: Any = error.trailing_metadata() or ()
        for key, value in trailing:
            if key == ERROR_KEY:
                return named(value)(error.details())
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return PullTimeout(f"{pull.what}: not here within the pull's deadline")
        return TransportFailed(f"{pull.what}: {error.code().name}: {error.details()}")


def _whole(pull: Pull, chunks: Iterable[wire.RawChunk]) -> Iterator[wire.RawChunk]:
    """Yield chunks of whole records. Parts of one, whose digest comes with the last, are put together."""
    record, filled = np.empty(0, np.uint8), 0
    for chunk in chunks:
        size = chunk.records.size
        if not filled and len(chunk.digests):
            yield chunk
            continue
        if not record.size:
            record = np.empty(pull.record_bytes, np.uint8)
        if not 0 < size <= record.size - filled:
            raise TransportFailed(
                f"{pull.what}: {size} bytes of block {chunk.first_block} came after {filled} of"
                f" {pull.record_bytes}"
            )
        record[filled : filled + size] = chunk.records
        filled += size
        if len(chunk.digests):
            yield wire.RawChunk(chunk.first_block, record[:filled], chunk.digests)
            filled = 0
