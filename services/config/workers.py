"""The sections engine, scheduler, handoff, worker, slo, autoscale and fleet."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from baton import addresses
from baton.redis_url import KINDS, is_redis
from baton.services.config.fields import (
    OFF,
    Address,
    Count,
    GpuName,
    Port,
    Positive,
    Range,
    Seconds,
    Section,
    TransportName,
    one_password,
)
from baton.services.errors import ConfigError
from baton.services.lora import LoraSettings
from baton.services.speculation import SpeculativeSettings

HEARTBEATS = 5  # per worker_lease_s
PLACEMENT_LEASE = 3  # in worker leases
MAX_QUEUE_FACTOR = 1.25
PREFIX_PULL_S = 0.05
Milliseconds = Annotated[float, Field(gt=0)]


class EngineSettings(Section):
    """The engine of every worker; the router uses these settings too."""

    model: str = ""
    """Model: a folder in Hugging Face's layout, or a name on its hub."""
    served_model_name: list[str] = Field(default_factory=list)
    """Model name in the API, and further names that requests may use, with commas; by default the name or
    folder of the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV cache; the model's own by default."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Longest sequence, in prompt and output tokens."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV cache of one worker, in GiB."""
    max_num_seqs: Positive = 64
    """Maximum number of requests in one batch."""
    max_num_batched_tokens: Annotated[int, Field(ge=32)] | None = None
    """Maximum number of tokens in one engine step; long steps delay other requests. If unset: vLLM's default
    on a GPU; 256 on a CPU, or more if the largest batch needs it."""
    tensor_parallel_size: Positive = 1
    """Tensor-parallel ranks of one worker, or of each of its pipeline stages, one GPU each."""
    pipeline_parallel_size: Positive = 1
    """Pipeline stages of one worker."""
    data_parallel_size: Positive = 1
    """Workers of a gang, which compute a mixture of experts together (docs/gangs.md). The numbers of prefill,
    decode and mixed workers count gangs."""
    nodes: Positive = 1
    """Machines among which the ranks of each worker or gang are divided evenly (docs/gangs.md). More than one
    needs security.plain_ranks."""
    expert_parallel: bool = False
    """Each rank of a worker or gang has its own experts, instead of a part of every expert."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts with the same prefix."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls, e.g. hermes."""
    reasoning_parser: str = ""
    """vLLM's parser of reasoning, e.g. deepseek_r1."""
    speculative_config: SpeculativeSettings | None = None
    """Speculative decoding (docs/speculative-decoding.md). The flag replaces the whole value; 'none' turns it
    off."""
    lora: LoraSettings | None = None
    """LoRA adapters (docs/adapters.md). The flag replaces the whole value; 'none' turns them off."""
    extra: dict[str, Any] = Field(default_factory=dict, repr=False)  # may hold a Hugging Face token
    """Other engine arguments, by vLLM's names (AsyncEngineArgs)."""

    @property
    def images(self) -> bool:
        """Whether images are served, if the model takes them. If not, its vision tower is not loaded."""
        return not self.extra.get("language_model_only")

    @property
    def ranks(self) -> int:
        """The number of one worker's ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def spread(self) -> int:
        """The number of machines that run one worker's ranks."""
        return max(1, self.nodes // self.data_parallel_size)

    @property
    def local_ranks(self) -> int:
        """The number of one worker's ranks on each of its machines."""
        return self.ranks // self.spread

    @property
    def members(self) -> int:
        """The number of a gang's members: its workers, and one more on each further machine of a worker."""
        return self.data_parallel_size * self.spread

    @property
    def local_members(self) -> int:
        """The number of a gang's members on each machine."""
        return self.members // self.nodes

    @property
    def divides(self) -> bool:
        """Whether each machine gets an equal part."""
        fewer, more = sorted((self.data_parallel_size, self.nodes))
        return more % fewer == 0 and self.ranks % self.spread == 0

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        names = value.split(",") if isinstance(value, str) else value or []
        return [name for name in names if name != ""] if isinstance(names, list) else names

    @field_validator("speculative_config", "lora", mode="before")
    @classmethod
    def _off_or_plain(cls, value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in OFF:
            return None
        return dict(value) if isinstance(value, MappingProxyType) else value


class PolicySettings(Section):
    """The placement policy, by the registered names of its parts (scheduler/policy)."""

    filters: list[str] = Field(["placeable", "same_revision", "has_adapter", "not_excluded", "fits", "room"])
    pair_filters: list[str] = Field(["compatible"])
    scorers: dict[str, Annotated[float, Field(gt=0)]] = Field(
        dict.fromkeys(("prefill_work", "staging_room", "running_requests", "free_blocks"), 1.0)
    )
    picker: str = "power_of_four"


class SchedulerSettings(Section):
    """The scheduler."""

    address: Annotated[Address, Field(min_length=1)] = "127.0.0.1:7400"
    """host:port to listen on. Workers and routers may name several schedulers, with commas."""
    store: str = Field("memory", repr=False)
    """memory, or a Redis as redis://[:password@]host:port/db, or with ?password_file=PATH at the end instead
    of the password; for Sentinel, Redis Cluster and TLS see docs/clusters.md."""
    topic: str = Field("baton", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the deployment in a shared store."""
    worker_lease_s: Annotated[Seconds, Field(ge=2)] = 5.0  # a heartbeat may take 1.5 s
    """A worker is considered dead after this long without a heartbeat; it sends five in that time. A
    placement is released if its router does not renew it for three times as long, and saved KV that is not
    pulled for six times."""
    max_queued_prompt_tokens: Positive = 32_768
    """Maximum number of prompt tokens queued on one prefill worker; further requests wait in the router."""
    handoff_min_tokens: Count = 0
    """If a decode worker would compute fewer tokens of a prompt than this, it prefills the prompt itself,
    without a handoff."""
    idle_decode_tokens: Count = 8_192
    """Maximum number of prompt tokens that an idle decode worker prefills itself at a time while prefill
    workers have queues; 0 turns this off. Classes that give way do not use it."""
    metrics_port: Port = 0
    """Port of Prometheus metrics, on the host of scheduler.address; 0 takes a free one on loopback."""
    policy: PolicySettings = Field(default_factory=PolicySettings)
    """Filters, scorers (with weights) and picker, by name."""

    @property
    def heartbeat_s(self) -> float:
        """Interval of the workers' heartbeats."""
        return self.worker_lease_s / HEARTBEATS

    @property
    def placement_lease_s(self) -> float:
        """A placement is released if its router does not renew it for this long."""
        return self.worker_lease_s * PLACEMENT_LEASE

    @property
    def max_queue_factor(self) -> float:
        """Maximum number of requests placed on one decode worker, as a multiple of its max_num_seqs.

        With more than 1, some requests are prefilled while they wait for a slot.
        """
        return MAX_QUEUE_FACTOR

    @property
    def prefix_pull_s(self) -> float:
        """A prefill worker pulls a prompt's prefix from another one if that saves so much computing."""
        return PREFIX_PULL_S

    @field_validator("store")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value != "memory" and not is_redis(value):
            raise ValueError(f"use memory, {KINDS}")
        return one_password(value)

    def check_shared(self, schedulers: int = 1) -> None:
        """Raise ConfigError for several schedulers, named or to be started, without a shared store."""
        if self.store != "memory":
            return
        several = f"--schedulers is {schedulers}" if schedulers > 1 else ""
        if "," in self.address:
            several = f"scheduler.address names several schedulers ({self.address})"
        if several:
            raise ConfigError(
                f"{several} and scheduler.store is memory, so each would have drains and orders of its own: "
                "set scheduler.store to the Redis that they share, or name one scheduler"
            )


class HandoffSettings(Section):
    """The handoff of KV cache between workers."""

    enabled: bool | None = None
    """Whether workers hand KV over. If unset, they do, unless `baton up` or offline use starts only mixed
    workers. Without handoffs a worker can only be mixed, and needs no memory for saved KV."""
    transports: Annotated[list[TransportName], Field(min_length=1)] | None = None
    """Transports that a worker offers, in order of preference. If unset: shm, nixl where it is usable, and
    tcp (docs/handoff-wire.md)."""
    listen: Address = ""
    """host:port on which KV is served; by default the host of worker.listen and free ports. Other workers use
    the host that the worker advertises if this one is unset, 0.0.0.0 or [::]. Each rank takes two ports, from
    port to port + 2 * engine.tensor_parallel_size * engine.pipeline_parallel_size - 1; with 0 free ones."""
    staging_mib: Positive | None = None
    """Memory for saved KV, in MiB per rank. If unset: half of the KV cache, or one prompt of max_model_len if
    that is more, but at most a quarter of the free /dev/shm."""
    kv_wire_dtype: Literal["auto", "fp8_e4m3", "int8"] = "auto"
    """Data type in which a worker saves KV: auto is that of the cache; the others halve the bytes and lose
    precision (docs/handoff-wire.md). Workers can load all of them."""

    @field_validator("listen")
    @classmethod
    def _is_one(cls, value: str) -> str:
        if value:
            addresses.split(value)
        return value

    @property
    def host(self) -> str:
        return addresses.split(self.listen)[0] if self.listen else ""

    @property
    def port(self) -> int:
        return addresses.split(self.listen)[1] if self.listen else 0

    @property
    def connector(self) -> dict[str, Any]:
        """The values for HandoffConfig."""
        return self.model_dump(exclude={"enabled", "listen"}) | {"host": self.host, "port": self.port}


class WorkerSettings(Section):
    """The process of one worker."""

    listen: Address = "127.0.0.1:0"
    """host:port of the gRPC server; port 0 takes a free one, 0.0.0.0 and [::] all addresses."""
    advertise: str = ""
    """host:port, or only the host, at which others reach the worker. By default that of listen, or if it
    listens on all addresses, the one from which it reaches the scheduler."""
    worker_id: str = ""
    """Unique name, by which a drain is remembered. By default role, host and process id."""
    gang: str = Field("", pattern=r"^([^/]+(/\d{1,6})?)?$")
    """The worker's gang and its rank there, as NAME/RANK with ranks from 0, if engine.data_parallel_size or
    engine.nodes is above 1 (docs/gangs.md)."""
    metrics_port: Port = 0
    """Port of Prometheus metrics, on the host of worker.listen; 0 takes a free one on loopback."""
    cpu: str = ""
    """Cores for the engine, as '0' or '0-3'; all by default."""
    drain_timeout_s: Seconds = 60.0
    """Time limit for running requests after SIGTERM."""

    @property
    def gang_name(self) -> str:
        return self.gang.partition("/")[0]

    @property
    def gang_rank(self) -> int:
        return int(self.gang.partition("/")[2] or 0)

    @field_validator("advertise")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        if value and addresses.is_wildcard(addresses.split(value)[0]):
            raise ValueError("others cannot connect to it: give an address or the name of this machine")
        return value


class SloSettings(Section):
    """Latency goals for each request, used by autoscaling and traces."""

    ttft_ms: Milliseconds = 1_000.0
    """Goal for the time to first token."""
    itl_ms: Milliseconds = 100.0
    """Goal for the mean gap between the tokens of an answer."""


class AutoscaleSettings(Section):
    """Autoscaling of prefill, decode and encode workers (docs/autoscaling.md)."""

    mode: Literal["off", "advise", "roles", "on"] = "off"
    """off; advise, which only logs and shows what `on` would do; roles, which starts and ends no worker, but
    changes a worker's role if one side is short of workers and the other has one to spare; or on."""
    prefill: Range = "1-4"
    """Minimum and maximum number of prefill workers."""
    decode: Range = "1-4"
    """Minimum and maximum number of decode workers."""
    encode: Range = "0-0"
    """Minimum and maximum number of encode workers; 0-0: they are not scaled. With a minimum of 0, prompts'
    workers encode while there are few images."""

    def bounds(self, role: str) -> tuple[int, int]:
        """Return the minimum and maximum number of a role's workers."""
        least, _, most = getattr(self, role).partition("-")
        return int(least), int(most)

    @field_validator("prefill", "decode")
    @classmethod
    def _is_at_least_one(cls, value: str) -> str:
        if value.startswith("0-"):
            raise ValueError("the minimum is at least 1")
        return value


class FleetSettings(Section):
    """The workers of one machine, as `baton up` and `baton node` start them."""

    devices: Annotated[list[GpuName], Field(min_length=1)] | None = None
    """GPUs in the order in which workers take them, by index or UUID; a GPU listed several times is shared by
    as many workers (docs/operations.md). If unset, each worker has a GPU of its own, from
    CUDA_VISIBLE_DEVICES or from all."""
    node_rank: Count = 0
    """The number of this machine among the engine.nodes machines of each worker or gang, from 0."""
    engines: dict[Literal["prefill", "decode"], dict[str, Any]] = Field(default_factory=dict, repr=False)
    """Keys of `engine` that differ for prefill or decode workers, as {decode: {data_parallel_size: 8}}."""
