"""The transport `folder`: KV goes through files in a shared folder, KV_FOLDER or /tmp."""

from __future__ import annotations

import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from baton.handoff.errors import SourceError, TransportFailed
from baton.handoff.records import Records
from baton.handoff.transports.base import Pull, SavedShard, Transport
from baton.protos.handoff_pb2 import Shard

logger = logging.getLogger(__name__)
DIGEST = 8  # bytes


class Folder(Transport):
    name = "folder"

    def __init__(self) -> None:
        self._folder = Path(os.environ.get("KV_FOLDER", tempfile.gettempdir()))
        self._files: dict[tuple[str, int], Path] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-folder")  # one thread, to keep the order

    # ---- on the worker that saves

    def offer(self, saved: SavedShard) -> bytes:
        file = self._folder / f"{uuid.uuid4().hex}.kv"
        file.with_suffix(".part").touch()
        self._files[saved.request_id, saved.epoch] = file
        self._thread.submit(self._write, saved, file)
        return str(file).encode()

    def withdraw(self, request_id: str, epoch: int) -> None:
        if file := self._files.pop((request_id, epoch), None):
            self._thread.submit(file.unlink, missing_ok=True)

    def _write(self, saved: SavedShard, file: Path) -> None:
        """Write all digests, then all records. The file is renamed when it is complete."""
        part = file.with_suffix(".part")
        try:
            with part.open("wb") as out:
                for records in saved.read():
                    out.seek(records.first_block * DIGEST)
                    out.write(records.digests.tobytes())
                    out.seek(saved.num_blocks * DIGEST + records.first_block * saved.record_bytes)
                    out.write(records.data)
            part.rename(file)
        except (SourceError, OSError) as error:
            logger.warning("KV of request %s was not written: %s", saved.request_id, error)
            part.unlink(missing_ok=True)  # so the pull fails

    # ---- on the worker that pulls

    def reaches(self, shard: Shard) -> bool:
        return self.name in shard.offers and self._file(shard).parent.is_dir()

    def pull(self, pull: Pull) -> Iterator[Records]:
        file = self._file(pull.shard)
        while not file.exists():
            if not file.with_suffix(".part").exists() and not file.exists():
                raise TransportFailed(f"{pull.what}: {file} is gone")
            pull.check_time()
            time.sleep(0.001)
        first, stop = pull.first_block, pull.first_block + pull.num_blocks
        try:
            with file.open("rb") as source:
                source.seek(first * DIGEST)
                digests = np.frombuffer(source.read(pull.num_blocks * DIGEST), np.uint64)
                source.seek(pull.saved_blocks * DIGEST + first * pull.record_bytes)
                for at in range(first, stop, pull.records_a_chunk):
                    pull.check_time()
                    count = min(pull.records_a_chunk, stop - at)
                    data = np.frombuffer(source.read(count * pull.record_bytes), np.uint8)
                    data = data.reshape(count, pull.record_bytes)
                    yield Records(at, data, digests[at - first : at - first + count])
        except (OSError, ValueError) as error:  # such as a truncated file
            raise TransportFailed(f"{pull.what}: {file}: {error}") from None

    def _file(self, shard: Shard) -> Path:
        return Path(os.fsdecode(shard.offers[self.name]))

    # ---- on both

    def close(self) -> None:
        self._thread.shutdown(wait=True)
