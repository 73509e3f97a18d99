"""Keep the loads of an engine, on the scheduler's side: wishes, orders to the ranks, and merged reports.

`SchedulerSide` uses this module. It moves no bytes: on each rank, load/loader.py runs the loads and
load/pull.py pulls.

Leans on: vllm.v1.request.Request (request_id, num_tokens), and what scheduler_side.py leans on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.handoff.channels import HandoffClient
from baton.handoff.groups import CacheGroup, loaded_parts, serve
from baton.handoff.load.pull import LoadJob
from baton.handoff.manifest import is_of
from baton.handoff.params import LoadWish
from baton.handoff.reports import Costs, Key, Loaded, ShardLoad
from baton.handoff.vllm.metadata import StepJobs
from baton.protos.handoff_pb2 import Manifest


@dataclass
class _Load:
    wish: LoadWish
    manifest: Manifest | None
    complete: bool  # the prompt is complete, and the request has its first token
    arrived_s: float  # when the request arrived, or its prompt was complete
    tokens: int = 0  # number pulled; set when blocks are allocated
    cancelled: bool = False  # the request has ended
    done: list[ShardLoad] = field(default_factory=list)

    def end(self, request: Any) -> int:
        """Return how many tokens' KV to load: the last token is computed here, for its logits."""
        return int(min(self.wish.tokens, request.num_tokens - self.complete))


class Loads:
    """The loads of an engine. Used on the engine's thread."""

    def __init__(self, groups: tuple[CacheGroup, ...], client: HandoffClient, host: str) -> None:
        self._groups = groups
        self._client = client
        self._host = host
        self._wished: dict[str, _Load] = {}  # keyed by request id, until blocks are allocated
        self.ordered: dict[Key, _Load] = {}
        self._ended: list[Loaded] = []

    def __len__(self) -> int:
        return len(self._wished) + len(self.ordered)

    def waiting(self, *, begun: bool) -> int:
        """Return the number of waiting requests. begun: include those with a manifest."""
        ordered = (load for load in self.ordered.values() if begun or load.manifest is None)
        return len(self._wished) + sum(not load.cancelled for load in ordered)

    def add(self, request_id: str, wish: LoadWish) -> None:
        complete = wish.manifest is not None
        self._wished[request_id] = _Load(wish, wish.manifest, complete, time.monotonic())

    def is_unheard(self, request_id: str) -> bool:
        """Return whether a request has no blocks yet, and no manifest."""
        load = self._wished.get(request_id)
        return load is not None and load.manifest is None

    def loadable_tokens(self, request: Any, num_computed: int) -> int:
        """Return the number of tokens to load after the first `num_computed`; 0 after a preemption."""
        load = self._wished.get(request.request_id)
        if load is None:
            return 0
        end = load.end(request)
        return max(0, end - num_computed) if serve(self._groups, load.wish.tokens, end) else 0

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], num_external: int, jobs: StepJobs
    ) -> None:
        """Order the load into these blocks, by group. If the prefix cache has all the KV, the load ends."""
        load = self._wished.pop(request.request_id, None)
        if load is None:
            return
        wish, end = load.wish, load.end(request)
        if num_external == 0:
            self._give_up(request.request_id, load)
            self._ended.append(Loaded(request.request_id, wish.epoch))
            return
        load.tokens = num_external
        self.ordered[request.request_id, wish.epoch] = load
        jobs.loads.append(
            LoadJob(
                request_id=request.request_id,
                epoch=wish.epoch,
                tokens=wish.tokens,
                parts=loaded_parts(self._groups, tables, wish.tokens, end, end - num_external),
                waited_s=time.monotonic() - load.arrived_s,
                saved_as=wish.saved_as,
                manifest=load.manifest,
                complete=load.complete,
            )
        )

    def begin(self, key: Key, manifest: Manifest, jobs: StepJobs) -> None:
        """Pass on a manifest of a prompt that may be incomplete. Ignores loads that have ended."""
        load = self._find(key)
        if load is None or load.complete:
            return
        load.manifest = manifest
        if key in self.ordered:
            jobs.begins.append((key, manifest))

    def complete(self, key: Key, manifest: Manifest, jobs: StepJobs) -> None:
        """Let a load end, because its prompt is complete and its request has its first token."""
        load = self._find(key)
        if load is None or load.complete:
            return
        load.manifest, load.complete = manifest, True
        load.arrived_s = time.monotonic()
        if key in self.ordered:
            jobs.completes.append((key, manifest))

    def finished(self, request_id: str, jobs: StepJobs) -> None:
        """Stop the load of a request that has ended, or release KV that it has not begun to load."""
        for key, load in self.ordered.items():
            if key[0] == request_id:
                load.cancelled = True
                jobs.cancels.append(key)
        if (unused := self._wished.pop(request_id, None)) is not None:
            self._give_up(request_id, unused)

    def update(self, part: ShardLoad, ranks: int, jobs: StepJobs) -> None:
        """Record the end of one rank's load; report the load with the last rank's."""
        key = part.request_id, part.epoch
        load = self.ordered[key]
        load.done.append(part)
        if len(load.done) < ranks:
            if part.problem is not None:  # other ranks' early loads would wait for the prompt's end
                jobs.cancels.append(key)
            return
        del self.ordered[key]
        done, manifest = load.done, load.manifest
        near = manifest is not None and manifest.host == self._host
        start = (manifest.saved_at_s if manifest is not None and near else 0.0) or load.arrived_s
        self._ended.append(
            Loaded(
                *key,
                transport=next((each.transport for each in done if each.transport), ""),
                bytes=sum(each.bytes for each in done),
                blocks=max(each.blocks for each in done),  # a stage may lack a group
                costs=Costs.slowest([each.costs for each in done]),
                total_ms=(time.monotonic() - start) * 1e3,
                problem=next((each.problem for each in done if each.problem is not None), None),
                early_bytes=sum(each.early_bytes for each in done),
                tokens=load.tokens,
            )
        )

    def take(self) -> tuple[Loaded, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def _find(self, key: Key) -> _Load | None:
        load = self.ordered.get(key) or self._wished.get(key[0])
        return load if load is not None and load.wish.epoch == key[1] else None

    def _give_up(self, request_id: str, load: _Load) -> None:
        """Release unwanted KV of a complete prompt; other KV is dropped with its attempt."""
        manifest, wish = load.manifest, load.wish
        if (
            load.complete
            and manifest is not None
            and is_of(manifest, wish.saved_as or request_id, wish.epoch)
        ):
            self._client.release_soon(manifest)
