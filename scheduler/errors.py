"""The scheduler's exceptions.

BatonError
└── SchedulerError
    ├── NoCapacity
    ├── SchedulerUnavailable
    ├── Refused
    ├── StaleWorker
    ├── StoreUnavailable
    │   └── StoreRefuses
    ├── ListenFailed
    └── BadPolicy
"""

from baton.errors import BatonError
from baton.protos import scheduler_pb2 as pb


class SchedulerError(BatonError):
    """A placement, report or registration failed."""


class NoCapacity(SchedulerError):
    """A request cannot be placed now.

    `code`: NO_WORKERS, FULL, TOO_LARGE or STALE_EPOCH. `retry_after_s`: when a retry may help; 0: never.
    `settling`: the scheduler has just started and may not know all workers yet.
    """

    def __init__(
        self, code: pb.Rejection.Code, message: str, retry_after_s: float, *, settling: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.settling = settling


class SchedulerUnavailable(SchedulerError):
    """No scheduler answers. A retry may help after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Refused(SchedulerError):
    """The scheduler refused a call: it is malformed, or the worker serves a model other than the topic's."""


class StaleWorker(SchedulerError):
    """A registration has an epoch below `last`, the worker's last one."""

    def __init__(self, worker_id: str, epoch: int, last: int) -> None:
        super().__init__(f"epoch {epoch} of worker {worker_id} is late: {last} was seen")
        self.last = last


class StoreUnavailable(SchedulerError):
    """The store does not answer, or returns an error. The text omits the password and says what to do."""


class StoreRefuses(StoreUnavailable):
    """Waiting will not help: the store's URL, user or password seems to be wrong."""


class ListenFailed(SchedulerError):
    """The scheduler cannot listen on its address."""


class BadPolicy(SchedulerError):
    """A placement policy names a part that does not exist, or that two packages register."""
