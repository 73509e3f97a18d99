"""The errors around placements.

BatonError
└── SchedulerError
    ├── NoCapacity            a router: no placement now; carries the code and when to come back
    ├── SchedulerUnavailable  a router, a worker, the command line: no scheduler answers
    ├── Refused               a worker: it does not fit into this deployment, or asked something impossible
    ├── StaleWorker           the scheduler: a worker's message has an older epoch than its last one
    ├── StoreUnavailable      the scheduler: its store does not answer, or not as it should
    │   └── StoreRefuses      waiting will not help: a wrong URL, name or password
    ├── ListenFailed          the scheduler: its port is taken
    └── BadPolicy             the scheduler: a policy names a part that is not there, or that two offer
"""

from baton.errors import BatonError
from baton.protos import scheduler_pb2 as pb


class SchedulerError(BatonError):
    """Placing, reporting or registering failed."""


class NoCapacity(SchedulerError):
    """The scheduler rejected a request.

    `code` says why (NO_WORKERS, FULL, TOO_LARGE, STALE_EPOCH); `retry_after_s` is when a retry may help, 0 if
    it never will. `settling`: the scheduler has just started and may not know all workers yet.
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
    """No scheduler answers. It may be back after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class Refused(SchedulerError):
    """The scheduler refused a call: a model other than the topic's, or a malformed call."""


class StaleWorker(SchedulerError):
    """Report a registration with an epoch below `last`, the worker's last one."""

    def __init__(self, worker_id: str, epoch: int, last: int) -> None:
        super().__init__(f"epoch {epoch} of worker {worker_id} is late: {last} was seen")
        self.last = last


class StoreUnavailable(SchedulerError):
    """The store does not answer or refuses us. The text omits the password and names a cure."""


class StoreRefuses(StoreUnavailable):
    """The store's URL, name or password is wrong, as far as can be told."""


class ListenFailed(SchedulerError):
    """The scheduler cannot listen on its address."""


class BadPolicy(SchedulerError):
    """Report a policy's filter, scorer or picker that does not exist, or that two packages offer."""
