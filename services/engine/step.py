"""The results of an engine's steps, and their listener."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.block_log import Change
from baton.handoff.reports import Begun, Loaded, Saved
from baton.services.engine.counts import Counts
from baton.services.engine.patches import giving_way, step_times


@dataclass(frozen=True)
class EngineLoad:
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    deferred: int = 0  # waiting requests that need something other than room, such as KV


@dataclass
class EngineStep:
    outputs: dict[int, Any] = field(default_factory=dict)  # EngineCoreOutputs by client index
    begun: tuple[Begun, ...] = ()
    saved: tuple[Saved, ...] = ()
    loaded: tuple[Loaded, ...] = ()
    drafts: dict[str, list[int]] = field(default_factory=dict)  # drafts for decode workers, by request
    load: EngineLoad = EngineLoad()
    seconds: float = 0.0
    executed: bool = False
    times: step_times.StepPhases = field(default_factory=step_times.StepPhases)  # parts of `seconds`
    counts: Counts = field(default_factory=Counts)  # this step's counts
    shared: dict[str, int] = field(default_factory=dict)  # shared blocks of each request with a first output
    draft_length: int | None = None  # maximum length of the next drafts, if chosen step by step
    yielded: giving_way.Yielded = field(default_factory=giving_way.Yielded)  # this step's counts
    blocks: Change | None = None  # what the prefix cache gained and lost
    failed: Sequence[str] = ()  # requests that ended because the step raised
    problem: str = ""  # why the step raised

    @property
    def matters(self) -> bool:
        """Whether the step had any results. A step that only waited for KV has none."""
        return bool(
            self.executed
            or self.begun
            or self.saved
            or self.loaded
            or self.blocks
            or self.failed
            or any(o.outputs for o in self.outputs.values())
        )


class Listener(Protocol):
    """Callbacks of the engine, called in the loop's thread."""

    def on_step(self, step: EngineStep) -> None:
        """Handle a step that had results or changed the load."""

    def on_refused(self, internal_id: str, error: Exception) -> None:
        """Handle a request that the engine refuses and keeps no state of."""

    def on_failure(self, error: BaseException, running: Collection[str] | None = None) -> None:
        """Handle the engine's failure; called once, as the last call.

        running: the requests that may have caused it, or None if any may have
        """
