"""The sections of the scheduler, the workers and their engines."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from baton import addresses
from baton.redis_url import KINDS, has_password, is_redis
from baton.services.config.fields import (
    OFF,
    Address,
    Count,
    GpuName,
    Port,
    Positive,
    Seconds,
    Section,
    TransportName,
)
from baton.services.errors import ConfigError
from baton.services.lora import LoraSettings
from baton.services.speculation import SpeculativeSettings

Milliseconds = Annotated[float, Field(gt=0)]


class EngineSettings(Section):
    """The engine of every worker; the router uses the same settings."""

    model: str = ""
    """Model: a folder in Hugging Face's layout, or a name there."""
    served_model_name: str = ""
    """Model name in the API; the model's own by default."""
    served_model_aliases: list[str] = Field(default_factory=list)
    """Further names that requests may use for the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV cache; the model's own by default."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Longest sequence, prompt and output tokens together."""
    block_size: Positive | None = None
    """Tokens per KV block. If unset: vLLM's default on a GPU; 32 on a CPU, or 16 with MLA."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV cache of one worker, in GiB."""
    max_num_seqs: Positive = 64
    """Most requests in one batch."""
    max_num_batched_tokens: Annotated[int, Field(ge=32)] | None = None
    """Most tokens in one engine step: long steps delay other requests. If unset: vLLM's default on a GPU; 256
    on a CPU, or more if the largest batch needs it."""
    tensor_parallel_size: Positive = 1
    """Tensor-parallel ranks of one worker, one GPU each."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of prompts that begin alike."""
    tool_call_parser: str | None = None
    """Parser of tool calls, by vLLM's name, e.g. hermes."""
    reasoning_parser: str = ""
    """Parser of reasoning, by vLLM's name, e.g. deepseek_r1."""
    speculative_config: SpeculativeSettings | None = None
    """Speculative decoding (docs/speculative-decoding.md). A flag replaces the file's value; 'none' turns it
    off."""
    lora: LoraSettings | None = None
    """LoRA adapters (docs/adapters.md). A flag replaces the file's value; 'none' turns them off."""
    extra: dict[str, Any] = Field(default_factory=dict, repr=False)  # may hold a Hugging Face token
    """Further engine arguments, by vLLM's names (AsyncEngineArgs)."""

    @field_validator("speculative_config", "lora", mode="before")
    @classmethod
    def _off_or_plain(cls, value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in OFF:
            return None
        return dict(value) if isinstance(value, MappingProxyType) else value


class PolicySettings(Section):
    """The placement policy: classes by their registered names (scheduler/policy)."""

    filters: list[str] = Field(["placeable", "same_revision", "has_adapter", "not_excluded", "fits", "room"])
    pair_filters: list[str] = Field(["compatible"])
    scorers: dict[str, Annotated[float, Field(gt=0)]] = Field(
        dict.fromkeys(("prefill_work", "staging_room", "running_requests", "free_blocks"), 1.0)
    )
    picker: str = "power_of_four"


class SchedulerSettings(Section):
    """The scheduler, and the address at which others reach it."""

    address: Annotated[Address, Field(min_length=1)] = "127.0.0.1:7400"
    """host:port on which it listens. Others may name several, with commas: they share the requests."""
    store: str = Field("memory", repr=False)
    """memory, or a Redis as redis://[:password@]host:port/db; also Sentinels, a cluster, TLS
    (docs/clusters.md)."""
    store_password_file: str = ""
    """File with the store's password, instead of a password in its URL."""
    topic: str = Field("baton", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Namespace in a shared store."""
    heartbeat_s: Seconds = 1.0
    """Interval of the workers' heartbeats."""
    worker_lease_s: Seconds = 5.0
    """A worker without a heartbeat for this long is dead."""
    placement_lease_s: Seconds = 15.0
    """A placement that its router does not renew for this long is released; saved KV that no decode worker
    pulls, after twice as long."""
    max_queued_prompt_tokens: Positive = 32_768
    """Most prompt tokens placed on one prefill worker and not yet prefilled; further requests wait in the
    router."""
    max_queue_factor: Annotated[float, Field(ge=1)] = 1.25
    """Most requests placed on one decode worker, as a multiple of its max_num_seqs: those above 1 are
    prefilled meanwhile and take the next free slot. Further requests wait in the router."""
    handoff_min_tokens: Count = 0
    """Shorter prompts are prefilled by the decode worker, without a handoff."""
    idle_decode_tokens: Count = 8_192
    """Most prompt tokens that an idle decode worker prefills itself while prefill workers have a queue, as at
    the start of a burst; 0: none. Not for classes that give way."""
    prefix_pull_s: Annotated[float, Field(ge=0)] = 0.05
    """A prefill worker pulls the KV of a prompt's beginning from a worker that holds more of it if that saves
    at least this many seconds of computing; 0: never."""
    rebalance_after_s: Seconds | None = None
    """A worker changes its role when prefill or decode has been short of workers for this long while the
    other side had one to spare. Unset: never."""
    metrics_port: Port = 0
    """Port of Prometheus metrics over HTTP, on the host of address; 0 takes a free one on loopback."""
    policy: PolicySettings = Field(default_factory=PolicySettings)
    """Names of filters, scorers (with weights) and picker."""

    @field_validator("store")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value != "memory" and not is_redis(value):
            raise ValueError(f"use memory, {KINDS}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> SchedulerSettings:
        if self.worker_lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"worker_lease_s ({self.worker_lease_s}) is less than two heartbeat_s ({self.heartbeat_s})"
            )
        if self.store_password_file and has_password(self.store):
            raise ValueError(
                "a password in store and a store_password_file exclude each other: leave one out"
            )
        return self

    def check_shared(self, schedulers: int = 1) -> None:
        """Raise ConfigError for several schedulers, named or to be started, without a shared store.

        Processes of the deployment call it; an operator's command needs the addresses alone.
        """
        if self.store != "memory":
            return
        several = f"--schedulers is {schedulers}" if schedulers > 1 else ""
        if "," in self.address:
            several = f"scheduler.address names several schedulers ({self.address})"
        if several:
            raise ConfigError(
                f"{several} and scheduler.store is memory: "
                "drains and orders would hold at one of them alone; set scheduler.store to the Redis that "
                "they share, or name one scheduler"
            )


class HandoffSettings(Section):
    """The handoff of KV cache between workers."""

    enabled: bool | None = None
    """Whether workers hand KV over. If unset, they do, except in a deployment started as a whole (baton up,
    offline) with mixed workers only. Without handoffs a worker stays mixed, and sets no memory aside."""
    transports: Annotated[list[TransportName], Field(min_length=1)] | None = None
    """Transports that a worker offers, best first; both ends agree on one. If unset: shm, nixl where it can
    be used, and tcp (docs/handoff-wire.md)."""
    host: str = ""
    """Address on which KV is served; that of worker.listen by default. If it is unset, 0.0.0.0 or ::, other
    workers use the host that the worker advertises."""
    port: Port = 0
    """First TCP port on which KV is served; each rank takes two: port to port + 2 *
    engine.tensor_parallel_size - 1. 0 takes free ones."""
    staging_mib: Positive | None = None
    """Memory for saved KV that waits to be pulled, in MiB per rank. If unset: half of the KV cache, or one
    prompt of max_model_len if that is more, but at most a quarter of the free /dev/shm."""
    pull_timeout_s: Seconds = 20.0
    """Deadline of one pull."""
    kv_wire_dtype: Literal["auto", "fp8_e4m3", "int8"] = "auto"
    """Data type of KV in a handoff: auto is that of the cache; the others halve the bytes and lose precision
    (docs/handoff-wire.md). A worker saves in its own, and loads from any."""

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, value: str) -> str:
        host, port = addresses.split(value) if value else ("", 0)
        if port:
            raise ValueError("a host without a port; the port is handoff.port")
        return host


class WorkerSettings(Section):
    """The process of one worker."""

    listen: Address = "127.0.0.1:0"
    """host:port of its gRPC server; port 0 takes a free one, 0.0.0.0 and [::] all addresses."""
    advertise: str = ""
    """host:port at which others reach it, or the host alone. By default that of listen; if it listens on all
    addresses, the one from which it reaches the scheduler."""
    worker_id: str = ""
    """Unique name; a drain is remembered by it. By default made of role, host and process id."""
    metrics_port: Port = 0
    """Port of Prometheus metrics over HTTP, on the host of listen; 0 takes a free one on loopback."""
    cpu: str = ""
    """Cores to which the engine is pinned, as '0' or '0-3'; all by default."""
    acceptance_reference: Annotated[float, Field(gt=0, le=1)] | None = None
    """Expected acceptance rate of the first drafted position; learned if unset. A rate well below it raises
    an alarm (docs/observability.md)."""
    drain_timeout_s: Seconds = 60.0
    """After SIGTERM, running requests may take this long."""

    @field_validator("advertise")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        if value and addresses.is_wildcard(addresses.split(value)[0]):
            raise ValueError("others cannot dial it: give an address or the name of this machine")
        return value


class SloSettings(Section):
    """The goals of autoscaling, for each request."""

    ttft_ms: Milliseconds = 1_000.0
    """Time to first token, from the request's arrival."""
    itl_ms: Milliseconds = 100.0
    """Mean gap between the tokens of an answer."""


class AutoscaleSettings(Section):
    """Numbers of prefill and decode workers, chosen by the scheduler (docs/autoscaling.md)."""

    mode: Literal["off", "advise", "on"] = "off"
    """advise: log and show what `on` would do. on: do it."""
    min_prefill: Positive = 1
    """Fewest prefill workers."""
    max_prefill: Positive = 4
    """Most prefill workers."""
    min_decode: Positive = 1
    """Fewest decode workers."""
    max_decode: Positive = 4
    """Most decode workers."""
    down_after_s: Seconds = 120.0
    """A worker is taken away when fewer would have done for this long."""
    flip_after_s: Seconds = 5.0
    """A worker changes its role when the other side is short and its own could have spared it for this long;
    it then keeps the new role for as long."""

    @model_validator(mode="after")
    def _least_is_not_above_most(self) -> AutoscaleSettings:
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if least > most:
                raise ValueError(f"min_{role} ({least}) is above max_{role} ({most})")
        return self


class FleetSettings(Section):
    """The workers of one machine, as `baton up` and `baton node` start them."""

    devices: Annotated[list[GpuName], Field(min_length=1)] | None = None
    """GPUs in the order in which workers take them, by index or UUID; several workers share one that is named
    several times (docs/operations.md). If unset, each has its own, of CUDA_VISIBLE_DEVICES or of all."""
