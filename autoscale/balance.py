"""Change roles without goals: when one side is overloaded and the other has a worker to spare.

A side's pressure is its work relative to its capacity: queued prompt tokens over the token budget of a
step, or the larger share of the slots of the batches and of the KV blocks in use. Requests only booked on a
decode worker do not count. A worker or gang changes sides once one side's pressure has been high for
`after_s`, if the other side would be at ease without that worker and would have room for its bookings.
After a change, no role changes for `PAUSE` * `after_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.autoscale.orders import OTHER, busyness
from baton.autoscale.seen import Member, Seen
from baton.enums import role_name
from baton.protos import scheduler_pb2 as pb

HIGH = {pb.ROLE_PREFILL: 2.0, pb.ROLE_DECODE: 0.9}  # steps' worth of prompts per worker; share of slots
EASE = {pb.ROLE_PREFILL: 0.5, pb.ROLE_DECODE: 0.6}
PAUSE = 3.0  # multiple of `after_s`


@dataclass(frozen=True, slots=True)
class Flip:
    """A change that is due: `member` should take `role`."""

    member: Member
    role: pb.Role
    why: str


@dataclass(slots=True)
class Balance:
    after_s: float
    _since: dict[pb.Role, float] = field(default_factory=dict)  # role that is short of workers -> since when
    _pause_until: float = 0.0

    def start_over(self) -> None:
        """Forget how long sides were under pressure, because nobody was watching. The pause continues."""
        self._since.clear()

    def look(self, seen: Seen) -> Flip | None:
        for role, other in OTHER.items():
            short, able = _able(seen, role), _able(seen, other)
            pressure = _pressure(role, short, short)
            idlest = min(able, key=busyness, default=None)
            rest = [one for one in able if one is not idlest]
            if idlest is None or pressure < HIGH[role] or not _can_spare(other, able, rest):
                self._since.pop(role, None)
                continue
            if seen.at < max(self._since.setdefault(role, seen.at) + self.after_s, self._pause_until):
                continue
            self._since.clear()
            self._pause_until = seen.at + PAUSE * self.after_s
            why = (
                f"the {role_name(role)} side was at {pressure:.1f} for {self.after_s:g} s, "
                f"the other one is at {_pressure(other, able, able):.1f}"
            )
            return Flip(idlest, role, why)
        return None


def _able(seen: Seen, role: pb.Role) -> list[Member]:
    # A worker that cannot hand over KV cannot change sides.
    return [one for one in seen.of(role) if one.flips]


def _pressure(role: pb.Role, of: Sequence[Member], on: Sequence[Member]) -> float:
    """Return the pressure of the work of some workers if others did it."""
    if role == pb.ROLE_PREFILL:
        return sum(one.queued_tokens for one in of) / max(1, sum(one.step_tokens for one in on))
    requests = sum(one.load.running + one.load.waiting for one in of)
    by_batch = requests / max(1, sum(one.batch for one in on))
    return max(by_batch, sum(one.used for one in of) / max(1, sum(one.blocks for one in on)))


def _can_spare(role: pb.Role, all_: Sequence[Member], rest: Sequence[Member]) -> bool:
    booked, blocks = sum(one.booked for one in all_), sum(one.blocks for one in rest)
    return bool(rest) and _pressure(role, all_, rest) <= EASE[role] and booked <= blocks
