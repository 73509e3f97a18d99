"""Acknowledge the records of a windowed save, so that the source can reuse their slots.

At most one call runs at a time; the next one covers all records taken in between. If a call fails, the pull
ends, because no further records would arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from baton.handoff import windows
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import ERROR_KEY, HandoffError, TransportFailed, named
from baton.handoff.transports.base import Pull
from baton.protos.handoff_pb2 import TakenRequest


class Taken:
    """The acknowledgements of one pull. Without a window there are none."""

    def __init__(
        self,
        client: HandoffClient,
        pull: Pull,
        failed: Callable[[], object],
        reader: tuple[int, int] = (0, 1),
    ) -> None:
        """failed: called, on any thread, when a call fails; reader: this rank, and how many ranks pull."""
        self._reader = reader
        self._client = client
        self._pull = pull
        self._failed = failed
        windowed = pull.slots < pull.saved_blocks
        self._step = windows.part(pull.slots) if windowed else pull.saved_blocks + 1
        self._told = 0
        self._wanted = 0
        self._calling = False
        self._ended = False
        self._lock = threading.Lock()
        self.error: HandoffError | None = None

    @property
    def told(self) -> bool:
        """Whether the source may have dropped records."""
        return bool(self._told or self._wanted)

    def is_due(self, place: int) -> bool:
        """Return whether to acknowledge the records before this place now."""
        return place - max(self._told, self._wanted) >= self._step

    def tell(self, place: int) -> None:
        """Acknowledge, without waiting, all records before this place."""
        self._told = place
        self._soon()

    def pass_over(self, place: int) -> None:
        """Tell the source, without waiting, to skip the records before this place."""
        self._wanted = place
        self._soon()

    def end(self) -> None:
        """Ignore calls from now on, because everything is here. Raises the error of a failed one."""
        with self._lock:
            self._ended = True
        if self.error is not None:
            raise self.error

    def _soon(self) -> None:
        with self._lock:
            if self._calling:
                return
            self._calling = True
        self._call()

    def _call(self) -> None:
        pull, told = self._pull, (self._told, self._wanted)
        request = TakenRequest(
            request_id=pull.request_id,
            epoch=pull.epoch,
            ticket=pull.shard.ticket,
            taken=told[0],
            wanted=told[1],
            reader=self._reader[0],
            readers=self._reader[1],
        )
        call = self._client.taken(request, pull.shard.address)
        call.add_done_callback(lambda done: self._on_done(done, told))

    def _on_done(self, call: Any, told: tuple[int, int]) -> None:
        try:
            call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            with self._lock:
                if self._ended:
                    return
                self.error = self._translated(error)
            self._failed()
            return
        with self._lock:
            self._calling = (self._told, self._wanted) != told and not self._ended
            if not self._calling:
                return
        self._call()

    def _translated(self, error: Any) -> HandoffError:
        what = f"{self._pull.what}: the acknowledgement failed"
        if not isinstance(error, grpc.RpcError):
            return TransportFailed(f"{what}: the connection was closed")
        failed: Any = error
        for key, value in failed.trailing_metadata() or ():
            if key == ERROR_KEY:
                return named(value)(failed.details())
        return TransportFailed(f"{what}: {failed.code().name}: {failed.details()}")
