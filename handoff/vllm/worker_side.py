"""A rank's side of the connector owns its staging, service, transports, saver and loader.

Leans on: the order in which vLLM's model runners call a connector in one step (V1 without speculation, V1
with, V2): handle_preemptions (before anything is written), bind_connector_metadata, forward, wait_for_save,
get_transfer_results, build_connector_worker_meta; with speculation on V1 wait_for_save comes last, after the
drafter. A step's `StepResults` is therefore one object, to which wait_for_save may still add after vLLM has
taken it; vLLM passes it on only after the step. Also VllmConfig.model_config.max_model_len,
parallel_config.tensor_parallel_size, and get_pp_group (vllm.distributed.parallel_state; its rank_in_group,
world_size, cpu_group): the ranks of all stages register their caches at the same time.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections import deque
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group

from baton import rpc
from baton.addresses import join
from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.compatibility import compatibility_hash, in_words
from baton.handoff.config import MIB, PULL_S, HandoffConfig
from baton.handoff.forms import Division
from baton.handoff.groups import CacheGroup, num_records
from baton.handoff.load.loader import Loader
from baton.handoff.manifest import Puller
from baton.handoff.memory import segments
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.blocks import block_cache
from baton.handoff.memory.cache import BlockCache
from baton.handoff.records import Bytes
from baton.handoff.reports import ShardLoad
from baton.handoff.save import sizing
from baton.handoff.save.saver import Saver
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.save.trial import Trials
from baton.handoff.vllm import facts
from baton.handoff.vllm.metadata import RankHandshake, StepJobs, StepResults
from baton.security.identity import Identity

logger = logging.getLogger(__name__)
T = TypeVar("T")

STEPS_KEPT = 3  # one more than vLLM has in flight
BEGIN_BYTES = 1 << 30  # staging that is faulted in before a GPU's engine starts


def _of_all_stages(own: T) -> list[T]:
    """Exchange a value with this rank's counterparts in other pipeline stages; return all stages' values."""
    group = get_pp_group()
    found = [own] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


class WorkerSide:
    """One rank's side, made when its cache tensors exist."""

    def __init__(
        self,
        config: HandoffConfig,
        vllm_config: Any,
        kv_cache_config: Any,
        tensor_rank: int,
        kv_caches: Mapping[str, Any],
    ) -> None:
        """Start the service, together with the other pipeline stages. Raises HandoffError, SecurityError."""
        self._cache = cache = block_cache(
            kv_caches,
            kv_cache_config.num_blocks,
            config.kv_wire_dtype,
            facts.row_widths(kv_cache_config),
            facts.layer_names(kv_cache_config),
            division=Division(
                tensor_rank,
                vllm_config.parallel_config.tensor_parallel_size,
                facts.total_heads(vllm_config, kv_cache_config),
            ),
        )
        own = cache.layers, facts.attention_kernels(vllm_config, kv_cache_config)
        stages = _of_all_stages(own)
        cache.join([layers for layers, _ in stages], get_pp_group().rank_in_group)
        kernels = set().union(*(kernels for _, kernels in stages))
        found = facts.facts(vllm_config, kv_cache_config, cache, kernels, config)
        self._hash = compatibility_hash(found)
        self._facts = in_words(found)
        self._rank = rank = cache.rank
        # the rank may be a process of its own
        mine = Identity(Path(config.identity)) if config.identity else None
        rpc.act_as(mine, insecure=config.insecure)
        self._client = HandoffClient()
        self._transports = transports.create(config.transports)
        if cache.device is not None:
            transports.read_for(self._transports, cache.device)
        segments.remove_stale()
        longest = num_records(found.groups, vllm_config.model_config.max_model_len)
        self.staging = self._make_staging(config, cache, kv_cache_config.num_blocks, longest)
        self._service = self._serve(config)
        address, size = self._service.address, config.chunk_bytes
        self._saver = Saver(
            cache, self.staging, self._transports, rank=rank, address=address, chunk_bytes=size
        )
        self.loader = self._make_loader(config, cache, found.groups)
        self._results = StepResults()
        self._jobs: StepJobs | None = None  # the last step's jobs
        self._ended: list[ShardLoad] = []  # loads to report with the next step
        self._near = False  # the scheduler is in this process and calls `take_loads` before each step
        # the last steps' results, which the scheduler's side may have missed if a step failed
        self._told: deque[tuple[StepResults, KVConnectorTransferResults]] = deque(maxlen=STEPS_KEPT)
        self._untold: tuple[KVConnectorTransferResults, ...] = ()
        self._reported_room = (0, 0)
        # otherwise, segments would outlive a process that forgot to shut down
        atexit.register(self.close)

    def _make_staging(self, config: HandoffConfig, cache: BlockCache, blocks: int, longest: int) -> Staging:
        """blocks: size of the cache; longest: blocks of the longest prompt."""
        if config.staging_mib is None:
            size = sizing.staging_size(cache.record_bytes, blocks, longest, sizing.free_bytes())
        else:
            size = sizing.StagingSize(config.staging_mib * MIB, "handoff.staging_mib")
        logger.info("staging: %s", size)

        def came(memory: Bytes) -> None:
            cache.pin(memory)
            transports.register(self._transports, memory)

        arena = Arena(size.bytes, cache.record_bytes, pin=came)
        # Now, because pinning memory during the engine's graph capture would abort it. And a GiB takes a
        # second, for which the first long prompt would block a GPU's engine.
        arena.begin(min(longest * cache.record_bytes, BEGIN_BYTES) if cache.device is not None else 0)
        return Staging(arena, config.lease_s, functools.partial(transports.withdraw, self._transports))

    def _serve(self, config: HandoffConfig) -> HandoffService:
        chunk_bytes, rank = config.chunk_bytes, self._rank
        trials = Trials(self.staging, self._transports, self._client, rank=rank, chunk_bytes=chunk_bytes)
        listen = join(config.host, config.port_of(rank))
        return HandoffService(self.staging, rank, listen, chunk_bytes, config.published_host, trials=trials)

    def _make_loader(
        self, config: HandoffConfig, cache: BlockCache, groups: tuple[CacheGroup, ...]
    ) -> Loader:
        puller = Puller(
            worker_id=config.worker_id,
            rank=self._rank,
            compatibility_hash=self._hash,
            groups=groups,
            layers=cache.layers,
            form=cache.form,
        )
        return Loader(
            cache,
            puller,
            self._transports,
            self._client,
            pull_timeout_s=PULL_S,
            chunk_bytes=max(config.chunk_bytes, cache.load_bytes),
        )

    def handshake(self) -> RankHandshake:
        return RankHandshake(
            self._rank,
            rpc.host_id(),
            self._service.local_address,
            self._service.address,
            self.staging.capacity,
            any(transport.windows for transport in self._transports),
            self._hash,
            self._facts,
        )

    def withhold(self, jobs: StepJobs) -> None:
        self._saver.withhold(jobs.preempted)

    def begin_step(self, jobs: StepJobs) -> None:
        """Start the step's loads before its forward pass, so that they overlap with it."""
        self._results, self._jobs = StepResults(), jobs
        self._saver.drop(jobs.drops)
        self._saver.backlog.leave(jobs.ended)
        for job in jobs.loads:
            self.loader.reserve(job)
        for key, manifest in jobs.begins:
            self.loader.begin(key, manifest)
        for key, manifest in jobs.completes:
            self.loader.complete(key, manifest)
        self.loader.cancel(jobs.cancels)

    def save(self, jobs: StepJobs) -> None:
        done = [self._saver.save(job) for job in jobs.saves]
        self._results.saves += [one for one in done if one is not None]
        self._report_room()

    def transfer_results(self) -> KVConnectorTransferResults:
        """Return finished loads (failed ones in both sets) and requests whose kept blocks can be freed."""
        if not self._near:
            self._ended += self.loader.take_finished()
        loads, self._ended = self._ended, []
        self._results.loads += loads
        found = KVConnectorTransferResults(
            finished_sending={request_id for request_id, _ in self._saver.backlog.copied()},
            finished_recving={load.request_id for load in loads},
            failed_recving={load.request_id for load in loads if load.problem is not None},
        )
        untold, self._untold = self._untold, ()
        for one in untold:
            found.finished_sending |= one.finished_sending
            found.finished_recving |= one.finished_recving
            found.failed_recving |= one.failed_recving
        self._told.append((self._results, found))
        return found

    def step_failed(self, jobs: StepJobs) -> list[StepResults]:
        """Begin `jobs` if the failed step did not; return the last steps' results."""
        if self._jobs is not jobs:
            self.withhold(jobs)
            self.begin_step(jobs)
        results = [one for one, _ in self._told]
        if all(one is not self._results for one in results):
            results.append(self._results)
        return results

    def tell_again(self, known: Container[str]) -> None:
        """Report the last steps' transfers again, for the requests that the scheduler still has."""
        self._untold = tuple(
            KVConnectorTransferResults(
                finished_sending={name for name in one.finished_sending if name in known},
                finished_recving={name for name in one.finished_recving if name in known},
                failed_recving={name for name in one.failed_recving if name in known},
            )
            for _, one in self._told
        )
        self._told.clear()

    def results(self, jobs: StepJobs) -> StepResults | None:
        """Return the step's results, to which `save` may still add; None if there are none."""
        self._report_room()
        found = self._results
        return found if jobs.saves or found.saves or found.loads or found.staging else None

    def _report_room(self) -> None:
        room = self.staging.free_blocks, self.staging.capacity
        if room != self._reported_room:
            self._reported_room = self._results.staging[self._rank] = room

    def come_near(self, wake: Callable[[], object]) -> None:
        """Expect `take_loads` before each step. wake: see BatonConnector.wake_on_loads."""
        self._near = True
        self.loader.on_finished = self._saver.backlog.on_copied = wake

    def take_loads(self, promote: Callable[[ShardLoad], bool]) -> None:
        """Promote finished loads; the next step reports the loads that could not be promoted."""
        self._ended += [load for load in self.loader.take_finished() if not promote(load)]

    def close(self) -> None:
        atexit.unregister(self.close)
        self.loader.close()
        self._service.close()
        self._saver.close()
        self._cache.close()
        self.staging.close()
        transports.close(self._transports)
        self._client.close()
