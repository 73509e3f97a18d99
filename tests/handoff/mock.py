"""A transport within a process, with faults."""

import time
from dataclasses import dataclass
from typing import ClassVar

from baton.handoff.errors import TransportFailed
from baton.handoff.records import Records
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Transport


@dataclass
class Faults:
    corrupt_block: int | None = None  # one byte of this block's record is flipped
    truncate_at: int | None = None  # the stream ends before this block, without an error
    fail_at: int | None = None  # the connection breaks before this block
    delay_s: float = 0.0  # before each chunk, unless the pull is cancelled or late
    silent: str = ""  # address of a source that sends nothing


class Mock(Transport):
    """Reads the Staging that is in `sources` under the shard's address."""

    name: ClassVar[str] = "mock"
    sources: ClassVar[dict[str, Staging]] = {}

    def __init__(self):
        self.faults = Faults()
        self.pulls = []

    def offer(self, saved):
        """Offer nothing: `sources` determines what is reached."""

    def reaches(self, shard):
        return shard.address in self.sources

    def pull(self, pull):
        self.pulls.append(pull)
        stop = pull.first_block + pull.num_blocks
        with self.sources[pull.shard.address].opened(pull.request_id, pull.epoch) as entry:
            for first, last in entry.view.pieces(pull.first_block, stop, pull.records_a_chunk):
                self._delay(pull, 60.0 if pull.shard.address == self.faults.silent else self.faults.delay_s)
                if self.faults.fail_at is not None and self.faults.fail_at < last:
                    raise TransportFailed(f"{pull.what}: broken on demand")
                if self.faults.truncate_at is not None and self.faults.truncate_at < last:
                    return
                while first < last:
                    end = entry.view.wait(first, last, pull.what, pull.check_time)
                    data = entry.view.records(first, end).copy()
                    if self.faults.corrupt_block is not None and first <= self.faults.corrupt_block < end:
                        data[self.faults.corrupt_block - first, -1] ^= 1
                    yield Records(first, data, entry.view.digests(first, end))
                    first = end  # noqa: PLW2901

    def _delay(self, pull, delay_s):
        end = time.monotonic() + delay_s
        pull.check_time()
        while time.monotonic() < end:
            time.sleep(0.001)
            pull.check_time()
