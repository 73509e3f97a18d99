"""A source in a separate process."""

import os

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
    connection.send((True, None))
    while (asked := connection.recv()) is not None:
        name, arguments = asked
        if name == "held":
            connection.send((True, source.staging.held()))
        else:
            connection.send((True, getattr(source, name)(*arguments).SerializeToString()))
    source.close()
    connection.send((True, None))


class RemoteSource:
    """Its cache is `caches.make_cache(CACHE_BLOCKS, SEED)`, as in the test's process."""

    def __init__(self, lease_s=30.0, chunk_bytes=CHUNK_BYTES):
        ucx = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        order = lease_s, chunk_bytes, segments.DIRECTORY, ucx
        self._remote = zygote.Remote("source", f"{__name__}:serve", order)
        self.process = self._remote.process
        self._remote.receive(30)
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
            self._remote.send(None)
            self._remote.receive(30)
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait(10)
        self._remote.close(0)

    def _ask(self, name, *arguments):
        self._remote.send((name, arguments))
        return self._remote.receive(30)
