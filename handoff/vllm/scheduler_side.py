"""The scheduler's side of the connector orders saves and loads, and collects their results.

Leans on: vllm.v1.request.Request (request_id, num_tokens, num_computed_tokens, num_output_tokens, max_tokens,
kv_transfer_params, status), RequestStatus.FINISHED_ABORTED, SchedulerOutput (num_scheduled_tokens,
kv_connector_block_state, preempted_req_ids); Scheduler.schedule, which calls get_num_new_matched_tokens again
in each step after it returned None; Scheduler.update_from_output, which calls update_connector_output after
it has finished requests. For that reason `request_finished` cannot return the manifest, and the worker's host
calls `take_reports` after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from baton.handoff.channels import HandoffClient
from baton.handoff.config import HandoffConfig
from baton.handoff.errors import CompatibilityMismatch, NotCached, SaveFailed, StagingFull
from baton.handoff.groups import (
    CacheGroup,
    Part,
    described,
    final_part,
    final_records,
    num_records,
    parts_from,
    saved_parts,
)
from baton.handoff.manifest import seal
from baton.handoff.memory.cache import NULL_BLOCK
from baton.handoff.params import SaveWish, wish_of
from baton.handoff.reports import Begun, Key, Problem, Reports, Saved, ShardLoad, ShardSave, Staged
from baton.handoff.save.room import SaveRoom
from baton.handoff.save.saver import SaveJob
from baton.handoff.vllm.loads import Loads
from baton.handoff.vllm.metadata import RankHandshake, StepJobs, StepResults
from baton.protos.handoff_pb2 import Manifest, Shard
from baton.rpc import CALL_TIMEOUT_S, host_id


@dataclass
class _Prompt:
    request: Any
    wish: SaveWish
    refused: bool = False  # not cached as required: its save never begins
    chunks: int = 0  # steps so far
    records: int = 0  # records whose save was ordered


@dataclass
class _Save:
    """A save that was ordered. It outlives its request, which may end in the step of the last part."""

    num_tokens: int
    chunks: int = 0  # set with the last part
    begun: list[ShardSave] = field(default_factory=list)
    done: list[ShardSave] = field(default_factory=list)
    manifest: Manifest | None = None  # used by early pulls
    wanted: bool = True


class SchedulerSide:
    """The saves and loads of an engine. Used on the engine's thread."""

    def __init__(self, config: HandoffConfig, groups: tuple[CacheGroup, ...], cache_blocks: int) -> None:
        self._config = config
        self._groups = groups
        self._states = any(group.state for group in groups)
        self._host = host_id()
        self.client = HandoffClient()
        self._loads = Loads(groups, self.client, self._host)
        self._ranks: list[RankHandshake] = []
        self._to_save: dict[str, _Prompt] = {}  # keyed by request id, until the last part is ordered
        self._saving: dict[Key, _Save] = {}
        self._jobs = StepJobs()
        self.ordered = StepJobs()  # the last step's jobs
        self._begun: list[Begun] = []
        self._saved: list[Saved] = []
        self._kept: dict[str, Key] = {}  # keyed by request id: requests whose blocks a windowed save may read
        self._room = SaveRoom(cache_blocks)

    # ---- for the worker's host

    @property
    def compatibility_hash(self) -> str:
        return self._ranks[0].compatibility_hash

    @property
    def facts(self) -> Mapping[str, str]:
        return self._ranks[0].facts

    @property
    def addresses(self) -> list[str]:
        """The ranks' Handoff services as this machine dials them, in rank order."""
        return [one.local_address if one.host == self._host else one.address for one in self._ranks]

    @property
    def published_addresses(self) -> list[str]:
        """The ranks' Handoff services as other machines dial them, in rank order."""
        return [one.address for one in self._ranks]

    def staged(self, timeout_s: float = CALL_TIMEOUT_S) -> Staged:
        """Ask the ranks how much KV is staged. Thread-safe. Raises TransportFailed."""
        return self.client.staged(self.addresses, timeout_s)

    def idle_loads(self, *, told: bool) -> int:
        """Return how many requests are waiting only for a load. told: whether pulls wake the host."""
        prompts = sum(prompt.wish.prefix is not None for prompt in self._to_save.values())
        return max(0, self._loads.waiting(begun=told) - prompts)

    def is_unheard(self, request_id: str) -> bool:
        """Return whether a request is waiting, without blocks, for a source that has not sent anything."""
        return self._loads.is_unheard(request_id) and request_id not in self._to_save

    def take_reports(self) -> Reports:
        """Return the reports since the last call. Call this after each step.

        A save is reported in the same step as its request's first token. Prompts that waited too long for
        room are reported as not saved, before their prefill begins.
        """
        for request_id in self._room.take_overdue():
            wish = self._to_save[request_id].wish
            problem = Problem.of(
                StagingFull("the KV that waits to be pulled leaves no room for this prompt's")
            )
            self._saved.append(Saved(request_id, wish.epoch, None, problem))
        reports = Reports(tuple(self._begun), tuple(self._saved), self._loads.take())
        self._begun, self._saved = [], []
        return reports

    def begin_load(self, request_id: str, epoch: int, manifest: Manifest) -> None:
        self._loads.begin((request_id, epoch), manifest, self._jobs)

    def complete_load(self, request_id: str, epoch: int, manifest: Manifest) -> None:
        self._loads.complete((request_id, epoch), manifest, self._jobs)

    def load_ended(self, part: ShardLoad) -> None:
        self._loads.update(part, len(self._ranks), self._jobs)

    # ---- for vLLM's scheduler

    def set_ranks(self, handshakes: Mapping[int, RankHandshake]) -> None:
        """Register the ranks. Raises CompatibilityMismatch if their hashes differ."""
        self._ranks = [handshakes[rank] for rank in sorted(handshakes)]
        hashes = {rank.compatibility_hash for rank in self._ranks}
        if len(hashes) != 1:
            raise CompatibilityMismatch(
                f"the ranks of worker {self._config.worker_id!r} differ: {sorted(hashes)}"
            )
        self._room.windows = all(rank.windows for rank in self._ranks)
        self._room.hear({rank.rank: (rank.slots, rank.slots) for rank in self._ranks})

    def add(self, request: Any) -> None:
        wish = wish_of(request.kv_transfer_params)
        if isinstance(wish, SaveWish):
            self._to_save[request.request_id] = _Prompt(request, wish)
            wish = wish.prefix
        if wish is not None:
            self._loads.add(request.request_id, wish)

    def loadable_tokens(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens to load after `num_computed`; None (no room, or refused): ask later."""
        prompt = self._to_save.get(request.request_id)
        if prompt is not None and not self._may_begin(prompt, num_computed):
            return None
        return self._loads.loadable_tokens(request, num_computed)

    def _may_begin(self, prompt: _Prompt, num_computed: int) -> bool:
        """Return whether a prompt that will be saved may be computed now, from token `num_computed` on.

        A prompt to be saved only if cached is refused, once, if more than two blocks would have to be
        computed, or if the model keeps states.
        """
        request, most = prompt.request, 2 * max(group.block_size for group in self._groups)
        left = request.num_tokens - num_computed
        if prompt.wish.cached and not prompt.refused and (left > most or self._states):
            prompt.refused = True
            why = "a state has no prefix" if self._states else "it may have been evicted"
            here = f"the prefix cache of worker {self._config.worker_id!r}"
            lacks = NotCached(f"{here} lacks {left} of {request.num_tokens} tokens: {why}")
            self._saved.append(Saved(request.request_id, prompt.wish.epoch, None, Problem.of(lacks)))
        blocks = num_records(self._groups, request.num_tokens)
        if prompt.refused:
            return False
        return self._room.admits(request.request_id, blocks, self._slots(request, blocks))

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_external: int) -> None:
        self._loads.allocated(request, tables, num_external, self._jobs)

    def build_step(self, scheduler_output: Any) -> StepJobs:
        """Return the step's jobs, which save the records that are final after it."""
        for request_id in scheduler_output.preempted_req_ids or ():
            if (prompt := self._to_save.get(request_id)) is not None:
                prompt.records = 0  # the ranks skip what they have already copied
            if (key := self._kept.get(request_id)) is not None:
                self._jobs.preempted.append(key)
        for request_id in [name for name in self._to_save if name in scheduler_output.num_scheduled_tokens]:
            prompt = self._to_save[request_id]
            prompt.chunks += 1
            end = prompt.request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request_id]
            if end < prompt.request.num_tokens and not self._has_more(prompt, end):
                continue
            tables = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            self._save(prompt, tables, end)
        self.ordered, self._jobs = self._jobs, StepJobs()
        return self.ordered

    def _has_more(self, prompt: _Prompt, end: int) -> bool:
        """Return whether a step to token `end`, before the prompt's end, yields final records to save."""
        request_id, epoch = prompt.request.request_id, prompt.wish.epoch
        promised = self._room.promised(request_id) or (request_id, epoch) in self._saving
        return promised and final_records(self._groups, end) > prompt.records

    def _save(self, prompt: _Prompt, tables: Sequence[Sequence[int]], end: int) -> None:
        request, epoch = prompt.request, prompt.wish.epoch
        whole, last = num_records(self._groups, request.num_tokens), end >= request.num_tokens
        parts: tuple[Part, ...]
        if last:
            parts = parts_from(saved_parts(self._groups, tables, request.num_tokens), prompt.records)
        else:
            stop = final_records(self._groups, end)
            parts = (final_part(self._groups, tables, prompt.records, stop),)
            prompt.records = stop
        key = request.request_id, epoch
        slots = self._slots(request, whole)
        job = SaveJob(*key, parts, whole, last, slots)
        if slots < whole:
            self._kept[request.request_id] = key
        save = self._saving.setdefault(key, _Save(request.num_tokens))
        if last:
            del self._to_save[request.request_id]
            save.chunks = prompt.chunks
            if (lost := self._lost(job, beyond=end - request.num_tokens)) is not None:
                self._drop(key)
                self._saved.append(Saved(*key, None, Problem.of(lost)))
                return
        self._jobs.saves.append(job)

    def _drop(self, key: Key) -> None:
        save = self._saving.pop(key, None)
        self._room.forget(key[0])
        self._jobs.drops.append(key)
        if save is not None and save.manifest is not None:  # released now, because there may be no next step
            self.client.release_soon(save.manifest)

    def _slots(self, request: Any, records: int) -> int:
        """Return a save's number of slots. Only a request that ends with its prompt may have a window."""
        ends = request.max_tokens <= request.num_output_tokens + 1
        return self._room.slots(records) if ends else records

    def finished(self, request: Any) -> bool:
        """End a finished request's load and save. Return whether its blocks must be kept until `freed`."""
        self._loads.finished(request.request_id, self._jobs)
        if (prompt := self._to_save.pop(request.request_id, None)) is not None:
            self._drop((request.request_id, prompt.wish.epoch))
        if request.status == RequestStatus.FINISHED_ABORTED:
            for (request_id, _), save in self._saving.items():
                if request_id == request.request_id:
                    save.wanted = False
        key = self._kept.pop(request.request_id, None)
        if key is None:
            self._room.freed(request.request_id)
        else:
            self._jobs.ended.append(key)
        return key is not None

    def freed(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._room.freed(request_id)

    def update(self, results: StepResults) -> None:
        self._room.hear(results.staging)
        for saved in results.saves:
            self._add_save(saved)
        for loaded in results.loads:
            self.load_ended(loaded)

    def lost(self, results: Iterable[StepResults]) -> None:
        """After a failed step, process the last steps' unreported results and drop unfinished saves.

        The requests of these steps have ended. With several steps in flight, the failed one may not be the
        last.
        """
        for one in results:
            self._room.hear(one.staging)
            for saved in one.saves:
                if not saved.begun:
                    self._add_save(saved)
            for loaded in one.loads:
                if (loaded.request_id, loaded.epoch) in self._loads.ordered:
                    self.load_ended(loaded)
        for key in list(self._saving):
            self._drop(key)

    def close(self) -> None:
        self.client.close()

    # ---- inside

    def _lost(self, job: SaveJob, beyond: int) -> SaveFailed | None:
        """Return why the job's KV cannot be saved. beyond: number of tokens computed after the prompt."""
        what = f"KV of request {job.request_id!r}, epoch {job.epoch}"
        if beyond and self._states:
            return SaveFailed(f"{what}: its state is {beyond} tokens beyond the prompt's end")
        if any(NULL_BLOCK in part.block_ids for part in job.parts):
            return SaveFailed(f"{what}: a block that the next token needs is no longer kept")
        return None

    def _add_save(self, part: ShardSave) -> None:
        key = part.request_id, part.epoch
        save = self._saving.get(key)
        if save is None:
            return  # dropped
        if part.begun:
            save.begun.append(part)
            if len(save.begun) == len(self._ranks):
                self._room.kept(key[0])
                save.manifest = seal(self._manifest(key, save.num_tokens, save.begun))
                self._begun.append(Begun(*key, save.manifest))
            return
        save.done.append(part)
        if len(save.done) < len(self._ranks):
            return
        del self._saving[key]
        self._room.forget(key[0])
        problem = next((done.problem for done in save.done if done.problem is not None), None)
        manifest = self._manifest(key, save.num_tokens, save.done)
        # other machines' clocks differ
        near = {one.rank for one in self._ranks if one.host == self._host}
        manifest.saved_at_s = max(done.saved_at_s for done in save.done if done.rank in near)
        manifest.save_ms = max(done.save_ms for done in save.done)
        manifest.chunks = save.chunks
        seal(manifest)
        if problem is not None or not save.wanted:
            self.client.release_soon(manifest)
        if save.wanted:
            self._saved.append(Saved(*key, None if problem else manifest, problem))

    def _manifest(self, key: Key, num_tokens: int, shards: Sequence[ShardSave]) -> Manifest:
        """Return an unsealed manifest, without the fields that are known only at the end."""
        return Manifest(
            request_id=key[0],
            epoch=key[1],
            worker_id=self._config.worker_id,
            compatibility_hash=self.compatibility_hash,
            num_tokens=num_tokens,
            num_blocks=num_records(self._groups, num_tokens),
            groups=described(self._groups, num_tokens),
            shards=[
                Shard.FromString(part.shard)
                for part in sorted(shards, key=lambda part: part.rank)
                if part.problem is None
            ],
            wire_dtype=self._config.kv_wire_dtype,
            lease_s=self._config.lease_s,
            host=self._host,
        )
