"""The whole tree of settings, and lookup of keys by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator

from baton.services.classes import ClassesSettings, ClassSettings
from baton.services.config.fields import Count, ModelName, Section
from baton.services.config.router import OpsSettings, RouterSettings, SecuritySettings, TracingSettings
from baton.services.config.workers import (
    AutoscaleSettings,
    EngineSettings,
    FleetSettings,
    HandoffSettings,
    SchedulerSettings,
    SloSettings,
    WorkerSettings,
)

# Keys of earlier versions, and what replaces them.
GONE = {
    "autoscale.down_after_s": "it is 120",
    "autoscale.flip_after_s": "it is 5",
    "autoscale.interval_s": "it is 2",
    "autoscale.max_decode": "set autoscale.decode to MIN-MAX",
    "autoscale.max_encode": "set autoscale.encode to MIN-MAX",
    "autoscale.max_prefill": "set autoscale.prefill to MIN-MAX",
    "autoscale.min_decode": "set autoscale.decode to MIN-MAX",
    "autoscale.min_encode": "set autoscale.encode to MIN-MAX",
    "autoscale.min_prefill": "set autoscale.prefill to MIN-MAX",
    "engine.block_size": "set engine.extra.block_size",
    "engine.images": "set engine.extra.language_model_only to true",
    "engine.lora.max_lora_rank": "it follows from the adapters",
    "engine.served_model_aliases": "set engine.served_model_name to a list of names",
    "engine.seed": "set engine.extra.seed",
    "fleet.decode_engine": "set fleet.engines to {decode: ...}",
    "fleet.prefill_engine": "set fleet.engines to {prefill: ...}",
    "handoff.chunk_mib": "it is 4",
    "handoff.embeddings_mib": "it is 4096, or a quarter of the free /dev/shm if that is less",
    "handoff.host": "set handoff.listen to HOST:PORT",
    "handoff.lease_s": "it is six times scheduler.worker_lease_s",
    "handoff.port": "set handoff.listen to HOST:PORT",
    "handoff.pull_timeout_s": "it is 20, and 1 more per 4,000 tokens of the prompt",
    **dict.fromkeys(
        (f"models.NAME.{role}" for role in ("prefill", "decode", "mixed", "encode")),
        "set models.NAME.workers, as {prefill: 1, decode: 1}",
    ),
    "ops.key_file": "set ops.key to file:PATH",
    "router.api_key_file": "set router.api_key to file:PATH",
    "router.enable_force_include_usage": "set router.frontend.enable_force_include_usage",
    "router.enable_prompt_tokens_details": "set router.frontend.enable_prompt_tokens_details",
    "router.journal_mib": "it is a 64th of the machine's memory, and at least 256",
    "router.keep_alive_s": "it is 620",
    "router.keys_store_password_file": "append ?password_file=PATH to router.keys_store",
    "router.max_attempts": "it is 4",
    "router.max_connections": "it is 4096 for each of router.processes",
    "router.max_sequences": "it is 256",
    "router.max_wait_s": "it is half of router.request_timeout_s",
    "router.metrics_open": "read the metrics from router.metrics_port, which needs no key",
    "router.replace_wait_s": "it is a tenth of router.request_timeout_s",
    "router.slow_client_s": "it is 30",
    "scheduler.heartbeat_s": "it is a fifth of scheduler.worker_lease_s",
    "scheduler.max_queue_factor": "it is 1.25",
    "scheduler.placement_lease_s": "it is three times scheduler.worker_lease_s",
    "scheduler.prefix_blocks": "it is 64 million",
    "scheduler.prefix_pull_s": "it is 0.05",
    "scheduler.rebalance_after_s": "set autoscale.mode to roles",
    "scheduler.store_password_file": "append ?password_file=PATH to scheduler.store",
    "security.token_file": "set security.token to file:PATH",
    "tracing.headers": "set the variable OTEL_EXPORTER_OTLP_HEADERS",
    "tracing.slow_ms": "it is twice slo.ttft_ms",
    "worker.acceptance_reference": "set engine.speculative_config.acceptance_reference",
    "worker.engine_stall_s": "it is 300",
    "worker.gang_rank": "set worker.gang to NAME/RANK",
    "worker.scheduler_wait_s": "it is 60",
}


class ModelSettings(Section):
    """One of several models behind one router: its workers, and settings that differ from the top level."""

    workers: dict[Literal["prefill", "decode", "mixed", "encode"], Count] = Field(default_factory=dict)
    """Workers of `baton up` by role: prefill, decode, mixed and encode (docs/images.md). If unset, there are
    one prefill and one decode worker, or none with mixed ones."""
    engine: dict[str, Any] = Field(default_factory=dict, repr=False)
    scheduler: dict[str, Any] = Field(default_factory=dict, repr=False)
    """By default, topic is the top level's, a dot and the model's name; ports are the top level's, plus 1 for
    the second entry and so on."""
    worker: dict[str, Any] = Field(default_factory=dict)
    handoff: dict[str, Any] = Field(default_factory=dict)
    autoscale: dict[str, Any] = Field(default_factory=dict)
    slo: dict[str, Any] = Field(default_factory=dict)
    router: dict[str, Any] = Field(default_factory=dict)
    """Only chat_template, flush_ms, frontend, max_waiting and request_timeout_s may be set for a model."""


class Settings(BaseModel):
    """The whole tree, as `load` returns it."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, validate_default=True)

    engine: EngineSettings = Field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    handoff: HandoffSettings = Field(default_factory=HandoffSettings)
    security: SecuritySettings = Field(default_factory=SecuritySettings)
    autoscale: AutoscaleSettings = Field(default_factory=AutoscaleSettings)
    slo: SloSettings = Field(default_factory=SloSettings)
    classes: ClassesSettings = Field(default_factory=ClassesSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    ops: OpsSettings = Field(default_factory=OpsSettings)
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    models: dict[ModelName, ModelSettings] = Field(default_factory=dict)
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of log lines: text or json (docs/observability.md). It has no flag."
    )

    @property
    def deployment(self) -> str:
        """The deployment's name in certificates."""
        return self.security.topic or self.scheduler.topic

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_default(cls, value: Any) -> Any:
        return {} if value is None else value  # an empty section in YAML


def section_of(kind: Any) -> type[BaseModel] | None:
    """Return the section in a type, even an optional one; None for a plain value."""
    for one in (kind, *get_args(kind)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def below(kind: Any, key: str) -> Any:
    """Return the type of a key in a section or mapping; None if there is no such key."""
    if kind is Any or get_origin(kind) is dict:
        return Any if kind is Any else get_args(kind)[1]
    section = section_of(kind)
    field = section.model_fields.get(key) if section else None
    if field is None and section is ClassesSettings:  # a class that the operator names
        return ClassSettings
    return field.annotation if field else None


def keys(*path: str, tree: type[Settings] = Settings) -> list[str]:
    """Return the keys of the section at a path; empty for a plain value."""
    kind: Any = tree
    for part in path:
        kind = below(kind, part)
    section = section_of(kind)
    return list(section.model_fields) if section else []


def suggest(word: str, allowed: list[str]) -> str:
    """Return the end of an error: the closest allowed word, and all allowed ones."""
    close = difflib.get_close_matches(word, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint}; allowed: {', '.join(allowed)}"


def unknown(path: Sequence[str], tree: type[Settings] = Settings) -> str:
    """Return an error for an unknown key, or for one of an earlier version."""
    name = ".".join(path)
    known = ".".join(("models.NAME", *path[2:])) if path[0] == "models" else name
    if known in GONE:
        return f"{name} is no longer set: {GONE[known]}"
    return f"unknown key {name!r}{suggest(path[-1], keys(*path[:-1], tree=tree))}"
