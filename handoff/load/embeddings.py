"""Pull images' embeddings from encode workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from baton.handoff import transports
from baton.handoff.config import MIB, HandoffConfig
from baton.handoff.embeddings import Embeddings, Form
from baton.handoff.manifest import check_embedding
from baton.handoff.save.sizing import EMBEDDINGS_BYTES
from baton.handoff.transports.base import Cancellation, Pull, Transport
from baton.handoff.transports.whole import pulled
from baton.protos.handoff_pb2 import EmbeddingManifest


class EmbeddingPuller:
    """Pulls embeddings into this process. Thread-safe."""

    def __init__(
        self, worker_id: str, form: Form, names: Sequence[str] | None, most_bytes: int = EMBEDDINGS_BYTES
    ) -> None:
        """form: of this worker's model; names: transports, best first; most_bytes: what callers may keep."""
        self.most_bytes = most_bytes
        self._worker_id = worker_id
        self._form = form
        self._names = names
        self._transports: list[Transport] | None = None
        self._lock = threading.Lock()

    def bytes_for(self, rows: int) -> int:
        return rows * self._form.row_bytes

    def pull(
        self, manifest: EmbeddingManifest, identifier: str, rows: int, cancellation: Cancellation
    ) -> tuple[Embeddings, str]:
        """Check the manifest, pull, check digests. Also returns the transport's name. Raises HandoffError."""
        check_embedding(manifest, identifier, rows, self._form, self._worker_id)
        transport = transports.choose(self._usable(), manifest.shard)
        pull = Pull(
            request_id=identifier,
            epoch=manifest.epoch,
            shard=manifest.shard,
            saved_blocks=manifest.num_records,
            first_block=0,
            num_blocks=manifest.num_records,
            chunk_bytes=HandoffConfig.chunk_mib * MIB,
            cancellation=cancellation,
        )
        data = pulled(transport, pull).reshape(-1)[: rows * self._form.row_bytes]
        return Embeddings(data, rows, self._form.width, self._form.dtype), transport.name

    def close(self) -> None:
        with self._lock:
            transports.close(self._transports or ())
            self._transports = []

    def _usable(self) -> list[Transport]:
        """Make the transports only for the first pull, because most workers never pull embeddings."""
        with self._lock:
            if self._transports is None:
                self._transports = transports.create(self._names)
            return self._transports
