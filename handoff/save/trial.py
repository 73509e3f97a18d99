"""Measure the speed of a transport between two workers.

On request, the other rank stages a sample and offers it like saved KV. The pulling rank pulls the sample,
checks its digests and releases it. No engine's cache is involved.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

import grpc
import numpy as np

from baton.handoff.channels import HandoffClient
from baton.handoff.errors import HandoffError, NoCommonTransport, TransportFailed
from baton.handoff.records import Bytes
from baton.handoff.reports import Key
from baton.handoff.save.saver import shard_of
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Cancellation, Pull, Transport
from baton.handoff.transports.whole import pulled
from baton.protos import handoff_pb2 as pb

MAX_BYTES = 64 << 20
SAMPLE_TIMEOUT_S = 5.0  # time to make a sample
PULL_TIMEOUT_S = 5.0
EPOCH = 1
_SAMPLES = 4  # maximum; a further sample ends the oldest
_SHARE = 8  # a sample takes at most 1/_SHARE of free staging


class Trials:
    """Both ends of trials. Thread-safe."""

    def __init__(
        self,
        staging: Staging,
        transports: Sequence[Transport],
        client: HandoffClient,
        *,
        rank: int,
        chunk_bytes: int,
    ) -> None:
        self._staging = staging
        self._transports = transports
        self._client = client
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._samples: deque[Key] = deque()
        self._lock = threading.Lock()  # guards _samples
        self._pulling = threading.Lock()  # one trial at a time: two would halve each other's speed

    def sample(self, size: int) -> pb.SampleReply:
        """Stage and offer at most `size` bytes of noise, but at least a block. Raises StagingFull."""
        staging = self._staging
        wanted = min(size, MAX_BYTES) // max(1, staging.record_bytes)
        entry = staging.reserve(
            f"trial-{secrets.token_hex(8)}", EPOCH, max(1, min(wanted, staging.free_blocks // _SHARE))
        )
        noise = np.random.default_rng()

        def write(records: Bytes, _: int) -> None:
            records[:] = noise.integers(0, 256, records.shape, np.uint8)

        staging.fill(entry, self._chunk_bytes, write)
        staging.publish(entry)
        with self._lock:
            self._samples.append(entry.key)
            over = self._samples.popleft() if len(self._samples) > _SAMPLES else None
        if over is not None:
            staging.release(*over)
        shard = shard_of(staging, self._transports, entry, self._rank, self._chunk_bytes)
        return pb.SampleReply(request_id=entry.request_id, shard=shard, num_blocks=entry.num_blocks)

    def trial(self, request: pb.TrialRequest) -> pb.TrialReply:
        """Pull a sample from another rank. If that fails, the reply says why."""
        if not self._pulling.acquire(blocking=False):
            return pb.TrialReply(problem="another trial is running on this worker: try again")
        try:
            return self._trial(request)
        except HandoffError as error:
            return pb.TrialReply(problem=f"{type(error).__name__}: {error}")
        finally:
            self._pulling.release()

    def _trial(self, request: pb.TrialRequest) -> pb.TrialReply:
        transport = next((one for one in self._transports if one.name == request.transport), None)
        if transport is None:
            raise NoCommonTransport(f"this worker does not offer {request.transport!r} (handoff.transports)")
        try:
            wanted = pb.SampleRequest(bytes=request.bytes)
            sample: pb.SampleReply = self._client.call(
                "Sample", request.source, wanted, SAMPLE_TIMEOUT_S
            ).result()
        except grpc.RpcError as error:
            raise TransportFailed(
                f"the Handoff service at {request.source} does not answer: {error.code().name}: "
                f"{error.details()}"
            ) from None
        sample.shard.address = request.source
        try:
            if not transport.reaches(sample.shard):
                raise NoCommonTransport(f"{request.transport} does not reach {request.source} from here")
            # Pull the first block in advance, so that connecting and mapping are not measured.
            self._pull(transport, sample, 1)
            began = time.monotonic()
            size = self._pull(transport, sample, sample.num_blocks)
            return pb.TrialReply(bytes=size, seconds=time.monotonic() - began)
        finally:
            self._client.release_soon(
                pb.Manifest(request_id=sample.request_id, epoch=EPOCH, shards=[sample.shard])
            )

    def _pull(self, transport: Transport, sample: pb.SampleReply, blocks: int) -> int:
        pull = Pull(
            request_id=sample.request_id,
            epoch=EPOCH,
            shard=sample.shard,
            saved_blocks=sample.num_blocks,
            first_block=0,
            num_blocks=blocks,
            chunk_bytes=self._chunk_bytes,
            cancellation=Cancellation(time.monotonic() + PULL_TIMEOUT_S),
        )
        return int(pulled(transport, pull).nbytes)
