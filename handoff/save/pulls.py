"""Answer pulls over TCP, sending records as they become available."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from baton.handoff.config import MAX_PULL_S
from baton.handoff.errors import HandoffError, MalformedManifest, PullCancelled, PullTimeout, SourceBusy
from baton.handoff.frames import FAIL, MOST_RECORDS, PULL, RECORDS, WAIT, WAIT_S, Broken, Frame, Line
from baton.handoff.save.staging import Staging
from baton.protos.handoff_pb2 import PullRequest

GROWING = 16  # maximum early pulls; each holds a thread until the prompt is complete
_REQUEST_S = 5.0  # time to receive a request
_TOO_LONG = f"a pull may take {MAX_PULL_S:g} s at most"


class Answers:
    """Answer pulls of one rank's saves. Thread-safe."""

    def __init__(self, staging: Staging, rank: int, chunk_bytes: int) -> None:
        self._staging = staging
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._growing = threading.BoundedSemaphore(GROWING)

    def answer(self, line: Line) -> bool:
        """Answer the next request. Returns whether the connection can be used again; raises Broken."""
        late_s = time.monotonic() + _REQUEST_S

        def in_time() -> None:
            if time.monotonic() > late_s:
                raise Broken(f"no complete request within {_REQUEST_S:g} s")

        frame = line.receive(in_time, _REQUEST_S)
        try:
            if frame.kind != PULL:
                raise MalformedManifest(f"expected a pull, received {frame.kind!r}")
            try:
                request = PullRequest.FromString(frame.head)
            except DecodeError as error:
                raise MalformedManifest(f"the pull cannot be parsed: {error}") from None
            self._send(line, request)
        except PullCancelled:
            return False  # the other end is gone
        except HandoffError as error:
            line.send(Frame(FAIL, f"{type(error).__name__}\n{error}".encode()))
        return True

    def _send(self, line: Line, request: PullRequest) -> None:
        if request.rank != self._rank:
            raise MalformedManifest(f"this is rank {self._rank}; the pull is for rank {request.rank}")
        key = request.request_id, request.epoch
        self._staging.tickets.check(*key, request.ticket)
        look = _Watch(line)
        most = min(self._chunk_bytes, min(request.at_once, MOST_RECORDS) * self._staging.record_bytes)
        blocks = request.first_block, request.num_blocks
        chunks = self._staging.read(*key, blocks, most, look.waiting)
        with self._room(request), contextlib.closing(chunks):
            for records in chunks:
                head = records.digests.astype("<u8", copy=False).tobytes()
                frame = Frame(RECORDS, head, records.first_block, len(records.data))
                line.send(frame, records.data, look.sending)
                look.sent()

    @contextlib.contextmanager
    def _room(self, request: PullRequest) -> Iterator[None]:
        """Count an early pull. Raises SourceBusy."""
        if not self._staging.is_growing(request.request_id, request.epoch):
            yield
            return
        if not self._growing.acquire(blocking=False):
            raise SourceBusy(
                f"KV of request {request.request_id!r}: its prompt is not complete yet, and {GROWING} pulls"
                " of incomplete prompts are running already"
            )
        try:
            yield
        finally:
            self._growing.release()


class _Watch:
    """End a pull that takes too long or whose puller is gone; send keepalives to a waiting puller."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._ends_s = time.monotonic() + MAX_PULL_S
        self._sent_s = time.monotonic()

    def sent(self) -> None:
        self._sent_s = time.monotonic()

    def sending(self) -> None:
        """Raise Broken after MAX_PULL_S: in the middle of a frame, no error can be sent."""
        if time.monotonic() > self._ends_s:
            raise Broken(_TOO_LONG)

    def waiting(self) -> None:
        """Raise PullTimeout after MAX_PULL_S, PullCancelled if the puller is gone."""
        if time.monotonic() > self._ends_s:
            raise PullTimeout(_TOO_LONG)
        if self._line.peek() is not False:
            raise PullCancelled("the pull was given up")
        if time.monotonic() - self._sent_s > WAIT_S:
            self._line.send(Frame(WAIT))
            self.sent()
