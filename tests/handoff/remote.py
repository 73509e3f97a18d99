"""A source in a separate process."""

import os
import tempfile
from pathlib import Path

from baton.handoff import transports
from baton.handoff.memory import segments
from baton.protos.handoff_pb2 import Manifest
from harness import zygote
from tests.handoff import caches

CACHE_BLOCKS = 41
SEED = 1
CHUNK_BYTES = 256 << 10


def serve(connection):
    """Serve until told to end. Runs in the source's process."""
    lease_s, chunk_bytes, segments.DIRECTORY, variables = connection.recv()
    os.environ.update(variables)
    cache = caches.make_cache(CACHE_BLOCKS, SEED)
    source = caches.source(
        cache,
        lease_s=lease_s,
        chunk_bytes=chunk_bytes,
        staging_bytes=96 * caches.MIB,
        names=transports.possible(),
    )
    connection.send(None)
    while (asked := connection.recv()) is not None:
        name, arguments = asked
        if name == "save":
            connection.send(source.save(*arguments).SerializeToString())
        elif name == "begin":
            connection.send(source.begin(*arguments).SerializeToString())
        elif name == "held":
            connection.send(source.staging.held())
    source.close()
    connection.send(None)


class RemoteSource:
    """Its cache is `caches.make_cache(CACHE_BLOCKS, SEED)`, as in the test's process."""

    def __init__(self, lease_s=30.0, chunk_bytes=CHUNK_BYTES):
        self._folder = tempfile.TemporaryDirectory()
        self.process, self._connection = zygote.connected(
            "source", f"{__name__}:serve", Path(self._folder.name)
        )
        ucx = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        self._connection.send((lease_s, chunk_bytes, segments.DIRECTORY, ucx))
        self._receive()
        self.cache = caches.make_cache(CACHE_BLOCKS, SEED)

    def save(self, request_id, block_ids, epoch=1):
        tokens = len(block_ids) * caches.BLOCK_SIZE
        return Manifest.FromString(self._ask("save", request_id, tokens, tuple(block_ids), epoch))

    def begin(self, request_id, block_ids, whole):
        return Manifest.FromString(self._ask("begin", request_id, tuple(block_ids), whole))

    def held(self):
        return self._ask("held")

    def records(self, block_ids):
        return caches.records(self.cache, block_ids)

    def close(self):
        if self.process.poll() is None:
            self._connection.send(None)
            self._receive()
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait(10)
        self._connection.close()
        self._folder.cleanup()

    def _ask(self, name, *arguments):
        self._connection.send((name, arguments))
        return self._receive()

    def _receive(self):
        if not self._connection.poll(30):
            self.process.kill()
            raise TimeoutError("no answer from the source's process")
        return self._connection.recv()
