"""Assemble what a router has per model: a view of the cluster, streams to workers, a front end."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from baton.keeping import keep
from baton.levels import set_level
from baton.protos import worker_pb2
from baton.scheduler.client import SchedulerClient
from baton.scheduler.need import Adapter
from baton.services.classes import Classes
from baton.services.engine import wire
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.args import VLLM_VERSION, takes_images
from baton.services.engine.step_checks import StepLimits
from baton.services.models import Model
from baton.services.router.chronicle import Chronicle
from baton.services.router.cluster import ClusterView
from baton.services.router.media.door import MediaDoor
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements
from baton.services.router.pool import WorkerPool
from baton.services.router.relay_parts import RelayParts
from baton.services.router.state import Journal
from baton.services.router.suspects import Convicts
from baton.services.router.vllm import frontend
from baton.services.router.vllm.engine_client import RelayClient, RelayLimits, request_digest, request_shape
from baton.services.router.vllm.metrics import EngineMetrics
from baton.services.router.waiting import WaitingRoom
from baton.tasks import stop


@dataclass(frozen=True)
class Shared:
    router_id: str
    metrics: RouterMetrics
    engine_metrics: EngineMetrics
    journal: Journal
    chronicle: Chronicle
    classes: Classes


@dataclass(frozen=True)
class Served:
    model: Model
    scheduler: SchedulerClient
    cluster: ClusterView
    parts: RelayParts
    client: RelayClient
    llm: frontend.RelayLLM
    args: Namespace  # to build vLLM's app

    async def app(self, media: MediaDoor) -> frontend.ModelApp:
        """Return vLLM's app for the model. `media` admits images, if the model takes them."""
        sees = takes_images(self.llm.model_config)
        app = await frontend.build_model_app(self.llm, self.args, media if sees else None)
        return frontend.ModelApp(app, self.model.names)


@contextlib.asynccontextmanager
async def served(
    model: Model, adapters: Sequence[AdapterFiles], shared: Shared, *, first: bool
) -> AsyncIterator[Served]:
    """Serve a model inside the block. Raises ConfigError and StartError.

    The `first` model's scheduler sets this process's log level.
    """
    own, router, metrics = model.settings.scheduler, model.settings.router, shared.metrics
    scheduler = SchedulerClient(own.address, router_id=shared.router_id, policy=own.policy)
    hello = worker_pb2.HelloRequest(
        router_id=shared.router_id, vllm_version=VLLM_VERSION, model=model.name, protocol=wire.PROTOCOL
    )
    pool = WorkerPool(hello, wire.decode_outputs, metrics.image_sent, own.worker_lease_s)
    cluster = ClusterView(
        scheduler,
        own.worker_lease_s,
        pool.reached,
        metrics.scheduler_losses.inc,
        set_level if first else lambda _: None,
    )
    metrics.ready_workers.labels(model.name).set_function(cluster.ready)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(scheduler.close)
        stack.push_async_callback(pool.close)
        config = frontend.build_config(model.settings)
        args = frontend.build_arguments(model.settings, config)
        waiting = WaitingRoom(router.max_waiting, router.max_wait_s, metrics, shared.classes)
        scheduler.reports.on_released = waiting.freed
        parts = RelayParts(
            Placements(scheduler, metrics, model.name if model.entry is not None else "", cluster.chosen),
            pool,
            metrics,
            waiting,
            router.replace_wait_s,
            shared.journal,
            shared.chronicle,
            Convicts(request_digest, request_shape),
            encode_min_tokens=router.media.encode_min_tokens,
        )
        cluster.tell(lambda: parts.counts.message(waiting))
        limits = RelayLimits(
            request_timeout_s=router.request_timeout_s,
            max_model_len=config.model_config.max_model_len,
            steps=StepLimits(config.model_config.get_vocab_size()),
            model=model.name,
            adapters={one.name: Adapter(one.name, one.fingerprint) for one in adapters},
            flush_s=router.flush_ms / 1e3,
        )
        client = RelayClient(parts, limits)
        llm = frontend.RelayLLM(config, client, cluster, model.settings.engine, shared.engine_metrics)
        stack.callback(llm.shutdown)
        stack.push_async_callback(stop, keep(cluster.watch, f"snapshots of {model.name}'s cluster"))
        learning = keep(partial(_learn, llm, cluster), f"learn the limits of {model.name}")
        stack.push_async_callback(stop, learning)
        yield Served(model, scheduler, cluster, parts, client, llm, args)


async def _learn(llm: frontend.RelayLLM, cluster: ClusterView) -> None:
    """Take the model's limits from the first ready worker. Until then the configured limits apply."""
    llm.learn(await cluster.first_capacity())
