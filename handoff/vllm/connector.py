"""Baton's KV connector: it adapts `SchedulerSide` and `WorkerSide` to vLLM's interface.

Loaded by KVTransferConfig(kv_connector="BatonConnector",
kv_connector_module_path="baton.handoff.vllm.connector", kv_role="kv_both", kv_load_failure_policy="fail",
kv_connector_extra_config={...fields of HandoffConfig...}). The worker's host runs in the scheduler's process
and calls the methods under "for the worker's host".

Leans on: KVConnectorBase_V1, SupportsHMA and their calls (vllm.distributed.kv_transfer.kv_connector.v1.base),
KVCacheConfig.kv_cache_groups, KVConnectorRole, KVConnectorTransferResults, get_tensor_model_parallel_rank
(vllm.distributed), has_kv_transfer_group, get_kv_transfer_group (vllm.distributed.kv_transfer),
KVTransferConfig.kv_connector_extra_config, Scheduler.{requests, finished_recving_kv_req_ids: read by
_handle_blocked_waiting_request}, RequestStatus.WAITING_FOR_REMOTE_KVS; the other modules of this package list
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from baton.handoff.config import HandoffConfig
from baton.handoff.errors import HandoffError
from baton.handoff.reports import ShardLoad
from baton.handoff.vllm import facts
from baton.handoff.vllm.metadata import RankHandshake, StepJobs, StepResults
from baton.handoff.vllm.scheduler_side import SchedulerSide
from baton.handoff.vllm.worker_side import WorkerSide
from baton.protos.handoff_pb2 import Manifest


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one object for the scheduler (`_scheduler` is set) and one per rank (`_worker` is set)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raise HandoffError for a wrong configuration or a cache that cannot be handed over."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = HandoffConfig.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._near: WorkerSide | None = None  # the only rank, if it is in the scheduler's process
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._config, facts.groups(kv_cache_config), kv_cache_config.num_blocks
            )

    @property
    def requires_kv_delivery(self) -> bool:
        # False: a save ends in the step that computes the last block, before any preemption; blocks not
        # copied by then are kept, because the request ends in that step
        return False

    # ---- for the worker's host: on the scheduler's object, between steps

    @property
    def scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise HandoffError(
                "this connector object is a rank's; the scheduler's is engine_core.scheduler.connector"
            )
        return self._scheduler

    def wake_on_loads(self, wake: Callable[[], object]) -> bool:
        """Call `wake`, on any thread, when a load has ended or kept blocks can be freed.

        Returns False if ranks are separate processes, whose loads are noticed in the next step. Otherwise,
        call `promote` before each step.
        """
        rank = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(rank, BatonConnector):
            return False
        self._near = rank._worker_side
        self._near.come_near(wake)
        return True

    def promote(self, scheduler: Any) -> None:
        """Let requests whose KV has been loaded take part in the next step.

        Otherwise vLLM would learn of them with the step's results and schedule them a step later, as it does
        with failed loads, aborted requests, and ranks in separate processes.
        """
        if self._near is None:
            return

        def can_run(load: ShardLoad) -> bool:
            request = scheduler.requests.get(load.request_id)
            if load.problem is not None or request is None:
                return False
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                return False
            self.scheduler_side.load_ended(load)
            scheduler.finished_recving_kv_req_ids.add(load.request_id)
            return True

        self._near.take_loads(can_run)

    def begin_now(self, request_id: str, epoch: int, manifest: Manifest) -> None:
        """Start the pull at once, on any thread, unless ranks are separate processes.

        `begin_load` follows on the engine's thread, for loads that get their blocks in between.
        """
        if self._near is not None:
            self._near.loader.begin((request_id, epoch), manifest)

    def begin_load(self, request_id: str, epoch: int, manifest: Manifest) -> None:
        """Let a load pull the records of a prompt that are available so far."""
        self.scheduler_side.begin_load(request_id, epoch, manifest)
        self.begin_now(request_id, epoch, manifest)

    def complete_load(self, request_id: str, epoch: int, manifest: Manifest) -> None:
        """Let a load end, because its prompt is complete and its request has a first token."""
        self.scheduler_side.complete_load(request_id, epoch, manifest)
        if self._near is not None:
            self._near.loader.complete((request_id, epoch), manifest)

    def step_failed(self, end_requests: Callable[[], None], known: Container[str]) -> None:
        """Undo a step that raised, if the only rank is in this process.

        end_requests: ends the step's requests in vLLM's scheduler; known: the scheduler's requests, a live
        view that `end_requests` changes. The ended requests' loads and saves end with the next step.
        """
        rank = get_kv_transfer_group()
        rank.clear_connector_metadata()
        results = rank._worker_side.step_failed(self.scheduler_side.ordered)
        end_requests()
        self.scheduler_side.lost(results)
        rank._worker_side.tell_again(known)

    # ---- scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], RankHandshake]) -> None:
        self.scheduler_side.set_ranks({one.rank: one for one in metadata.values()})

    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler_side.loadable_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler_side.build_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(connector_output.kv_connector_worker_meta, StepResults):
            self.scheduler_side.update(connector_output.kv_connector_worker_meta)
        self.scheduler_side.freed(connector_output.finished_sending or ())

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # all groups: vLLM must not zero a load's blocks, because the load may be running by then
        del request
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        return self.scheduler_side.finished(request), None

    # ---- a rank's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        given = self._config, self._vllm_config, self._kv_cache_config
        self._worker = WorkerSide(*given, get_tensor_model_parallel_rank(), kv_caches)

    def get_handshake_metadata(self) -> RankHandshake:
        return self._worker_side.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepJobs):
            self._worker_side.withhold(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker_side.begin_step(self._jobs)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads begin in bind_connector_metadata, before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not in the batch before its KV is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are saved when the step ends."""

    def wait_for_save(self) -> None:
        self._worker_side.save(self._jobs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids  # unusable without epochs: a new attempt may load in this step
        return self._worker_side.transfer_results()

    def build_connector_worker_meta(self) -> StepResults | None:
        return self._worker_side.results(self._jobs)

    # ---- both

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    @property
    def _jobs(self) -> StepJobs:
        jobs = self._get_connector_metadata()
        if not isinstance(jobs, StepJobs):
            raise HandoffError(f"the step's connector metadata is a {type(jobs).__name__}, not StepJobs")
        return jobs

    @property
    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise HandoffError("this rank's KV cache is not registered yet")
        return self._worker
