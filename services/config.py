"""The configuration: one tree of settings for every process of a deployment.

A value comes from the first source that has it: command-line flag, environment (`BATON_SECTION__KEY`), YAML
file (`--config`, or BATON_CONFIG), default. An unknown key is refused in any of them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from baton import addresses
from baton.redis_url import KINDS, has_password, is_redis
from baton.services.classes import ClassesSettings, ClassSettings
from baton.services.errors import NOT_YAML, ConfigError
from baton.services.lora import LoraSettings
from baton.services.speculation import SpeculativeSettings

ENV_PREFIX = "BATON_"
ENV_CONFIG_FILE = "BATON_CONFIG"  # names the YAML file, as --config does
OFF = ("none", "null", "")  # values that turn an optional section off
# (section, key) of values that are never shown, neither in an error nor in a process's title.
SECRET = {
    ("router", "api_key"),
    ("router", "keys_store"),
    ("scheduler", "store"),
    ("engine", "extra"),
    ("security", "token"),
    ("tracing", "headers"),
    ("ops", "key"),
}
REVEAL = {"secrets": True}  # the context of a dump with secrets, for another process of Baton's
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _address(value: str) -> str:
    """Check host:port, or several separated by commas. Raises ValueError."""
    for one in value.split(",") if value else []:
        try:
            addresses.split(one)
        except ValueError:
            port = ""
        else:
            port = one.strip().rpartition(":")[2]
        if not port.isdecimal():
            raise ValueError("give host:port, with a port up to 65535")
    return value


Address = Annotated[str, AfterValidator(_address)]


def _transport(value: str) -> str:
    """Check the name of a handoff transport, Baton's or an installed package's. Raises ValueError."""
    # Imported only for a configuration that names transports: it takes as long as all other imports here.
    from baton.handoff.errors import HandoffError
    from baton.handoff.transports import REGISTRY

    try:
        REGISTRY.check([value])
    except HandoffError as error:
        raise ValueError(str(error)) from None
    return value


TransportName = Annotated[str, AfterValidator(_transport)]


def _gpu(value: Any) -> Any:
    """Return a GPU's name as CUDA_VISIBLE_DEVICES has it: YAML makes numbers of some. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", value):
        raise ValueError("give GPUs as CUDA_VISIBLE_DEVICES does: by index, or as GPU-... or MIG-...")
    return value


GpuName = Annotated[str, BeforeValidator(_gpu)]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `port: yes`: YAML makes a bool of it, and pydantic a 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kind = cls.model_fields[info.field_name].annotation
            if {int, float} & {kind, *get_args(kind)}:
                raise ValueError("a number is expected")
        return value


class EngineSettings(_Section):
    """The engine of every worker; the router uses the same settings."""

    model: str = Field("", description="Model: a folder in Hugging Face's layout, or a name there.")
    served_model_name: str = Field("", description="Model name in the API; the model's own by default.")
    served_model_aliases: list[str] = Field(
        default_factory=list, description="Further names that requests may use for the model."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of weights and KV cache; the model's own by default."
    )
    max_model_len: int | None = Field(
        None, ge=16, description="Maximum length of a sequence, prompt and output tokens together."
    )
    block_size: int | None = Field(
        None,
        ge=1,
        description="Tokens per KV block. If unset: vLLM's default on a GPU; 32 on a CPU, or 16 with MLA.",
    )
    kv_cache_gib: float | None = Field(None, gt=0, description="KV cache of one worker, in GiB.")
    max_num_seqs: int = Field(64, ge=1, description="Most requests in one batch.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=32,
        description="Most tokens in one engine step: long steps delay the other requests. If unset: vLLM's "
        "default on a GPU; 256 on a CPU, or more where the largest batch needs it.",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="Tensor-parallel ranks of one worker, one GPU each."
    )
    enable_prefix_caching: bool = Field(
        True, description="Prefix caching: prompts that begin alike share their KV blocks."
    )
    seed: int = Field(0, description="Seed of the engines' random numbers.")
    tool_call_parser: str | None = Field(
        None, description="Parser of tool calls, by vLLM's name, e.g. hermes."
    )
    reasoning_parser: str = Field("", description="Parser of reasoning, by vLLM's name, e.g. deepseek_r1.")
    speculative_config: SpeculativeSettings | None = Field(
        None,
        description="Speculative decoding (docs/speculative-decoding.md). The flag replaces the file's value "
        "as a whole; 'none' turns it off.",
    )
    lora: LoraSettings | None = Field(
        None,
        description="LoRA adapters, served beside the model (docs/adapters.md). The flag replaces the file's "
        "value as a whole; 'none' turns them off.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,  # may hold a Hugging Face token
        description="Further engine arguments, by vLLM's names (AsyncEngineArgs).",
    )

    @field_validator("speculative_config", "lora", mode="before")
    @classmethod
    def _off_or_plain(cls, value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in OFF:
            return None
        return dict(value) if isinstance(value, MappingProxyType) else value


class PolicySettings(_Section):
    """The placement policy: classes by their registered names (scheduler/policy)."""

    filters: list[str] = ["placeable", "same_revision", "has_adapter", "not_excluded", "fits", "room"]
    pair_filters: list[str] = ["compatible"]
    scorers: dict[str, Annotated[float, Field(gt=0)]] = {
        "prefill_work": 1.0,
        "staging_room": 1.0,
        "running_requests": 1.0,
        "free_blocks": 1.0,
    }
    picker: str = "power_of_four"


class SchedulerSettings(_Section):
    """The scheduler, and the address at which others reach it."""

    address: Address = Field(
        "127.0.0.1:7400",
        min_length=1,
        description="host:port on which it listens. Others may name several schedulers, separated by commas: "
        "they share the requests.",
    )
    store: str = Field(
        "memory",
        repr=False,
        description="memory, redis://[:password@]host:port/db, redis+sentinel://host:port,host:port/master "
        "or redis+cluster://host:port,host:port; with rediss for TLS (docs/clusters.md).",
    )
    store_password_file: str = Field(
        "", description="File with the store's password, instead of a password in its URL."
    )
    topic: str = Field("baton", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Namespace in a shared store.")
    heartbeat_s: Seconds = Field(1.0, description="Interval of the workers' heartbeats.")
    worker_lease_s: Seconds = Field(5.0, description="A worker without a heartbeat for this long is dead.")
    placement_lease_s: Seconds = Field(15.0, description="A placement not renewed for this long is released.")
    max_queued_prompt_tokens: int = Field(
        32_768,
        ge=1,
        description="Most prompt tokens placed on one prefill worker and not yet prefilled; beyond, requests "
        "wait in the router.",
    )
    max_queue_factor: float = Field(
        1.25,
        ge=1,
        description="Most requests placed on one decode worker, as a multiple of its max_num_seqs: those "
        "above 1 are prefilled meanwhile and take the next free slot. Beyond, requests wait in the router.",
    )
    handoff_min_tokens: int = Field(
        0, ge=0, description="Shorter prompts are prefilled by the decode worker itself, without a handoff."
    )
    idle_decode_tokens: int = Field(
        8_192,
        ge=0,
        description="Most prompt tokens that an idle decode worker prefills itself while prefill workers "
        "have a queue, as at the beginning of a burst; 0: none. It takes none of classes that give way.",
    )
    prefix_pull_s: float = Field(
        0.05,
        ge=0,
        description="A prefill worker pulls the KV of a prompt's beginning from a worker that holds more of "
        "it where that saves so many seconds of computing, at the speed that it has shown; 0: never.",
    )
    prefix_blocks: int = Field(
        64_000_000,
        ge=1,
        description="Most KV blocks of which the scheduler remembers which workers hold them, some 12 bytes "
        "each. Beyond, it knows only every second block of a prompt, then every fourth, and so on.",
    )
    rebalance_after_s: Seconds | None = Field(
        None,
        description="A worker changes its role when one side, prefill or decode, was short of workers for "
        "this long while the other had one to spare; never if unset.",
    )
    metrics_port: Port = Field(
        0,
        description="Port of Prometheus metrics over HTTP, on the host of address; 0 takes a free one on "
        "loopback.",
    )
    policy: PolicySettings = Field(
        default_factory=PolicySettings, description="Names of filters, scorers (with weights) and picker."
    )

    @field_validator("store")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value != "memory" and not is_redis(value):
            raise ValueError(f"use memory, {KINDS}")
        return value

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> SchedulerSettings:
        if self.worker_lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"worker_lease_s ({self.worker_lease_s}) is less than two heartbeat_s ({self.heartbeat_s})"
            )
        return self

    @model_validator(mode="after")
    def _one_password(self) -> SchedulerSettings:
        if self.store_password_file and has_password(self.store):
            raise ValueError(
                "a password in store and a store_password_file exclude each other: leave one out"
            )
        return self

    def check_shared(self, schedulers: int = 1) -> None:
        """Raise ConfigError for several schedulers, named or to be started, without a shared store.

        To be called by processes of the deployment; an operator's command needs the addresses alone.
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


class HandoffSettings(_Section):
    """The handoff of KV cache between workers."""

    enabled: bool | None = Field(
        None,
        description="Whether workers hand KV over. If unset, they do, except in a deployment started as a "
        "whole (baton up, offline) with mixed workers only. Without handoffs no memory is set aside for "
        "saved KV, and a worker stays a mixed one.",
    )
    transports: list[TransportName] | None = Field(
        None,
        min_length=1,
        description="Transports that a worker offers, best first; both ends agree on one. If unset: shm, "
        "nixl where it can be used (docs/handoff-wire.md), and tcp. Other packages may add some "
        "(docs/extending.md).",
    )
    host: str = Field(
        "",
        description="Address on which KV is served; that of worker.listen by default. If it is unset, "
        "0.0.0.0 or ::, other workers use the host that the worker advertises.",
    )
    port: Port = Field(
        0,
        description="First TCP port on which KV is served. Each rank of a worker takes two, one for "
        "calls and the next one for records: port to port + 2 * engine.tensor_parallel_size - 1. 0 takes "
        "free ones.",
    )
    staging_mib: int | None = Field(
        None,
        ge=1,
        description="Memory for saved KV that waits to be pulled, in MiB per rank. If unset: half of the KV "
        "cache, or one prompt of max_model_len if that is more, but at most a quarter of the free /dev/shm. "
        "A prompt that takes more than half of it goes through a quarter of it, part by part.",
    )
    lease_s: Seconds = Field(30.0, description="Time that saved KV is kept for the decode worker.")
    pull_timeout_s: Seconds = Field(20.0, description="Deadline of one pull.")
    chunk_mib: int = Field(
        4,
        ge=1,
        le=32,
        description="Size of one read: from shared memory, or over tcp, where it is 4 MiB at most.",
    )
    kv_wire_dtype: Literal["auto", "fp8_e4m3", "int8"] = Field(
        "auto",
        description="Data type of KV in a handoff: auto is that of the cache; the others halve the bytes and "
        "lose precision (docs/handoff-wire.md). A worker saves in its own, and loads from any.",
    )

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, value: str) -> str:
        host, port = addresses.split(value) if value else ("", 0)
        if port:
            raise ValueError("a host without a port; the port is handoff.port")
        return host


class WorkerSettings(_Section):
    """The process of one worker."""

    listen: Address = Field(
        "127.0.0.1:0",
        description="host:port of its gRPC server; port 0 takes a free one, 0.0.0.0 and [::] all addresses.",
    )
    advertise: str = Field(
        "",
        description="host:port at which others reach it, or the host alone. By default the listening "
        "address; if that is all addresses, the one from which it reaches the scheduler.",
    )
    worker_id: str = Field(
        "",
        description="Unique name; a drain is remembered by it. By default made of role, host and process id.",
    )
    metrics_port: Port = Field(
        0,
        description="Port of Prometheus metrics over HTTP, on the host of listen; 0 takes a free one on "
        "loopback.",
    )
    cpu: str = Field("", description="Cores to which the engine is pinned, as '0' or '0-3'; all by default.")
    acceptance_reference: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Expected acceptance rate of the first drafted position; learned if unset. A rate well "
        "below it raises an alarm: docs/observability.md.",
    )
    drain_timeout_s: Seconds = Field(60.0, description="After SIGTERM, running requests may take this long.")
    engine_stall_s: Seconds = Field(
        300.0, description="An engine step that takes longer counts as hanging: the worker fails."
    )
    scheduler_wait_s: Seconds = Field(15.0, description="At start, wait this long for the scheduler.")

    @field_validator("advertise")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        if value and addresses.is_wildcard(addresses.split(value)[0]):
            raise ValueError("others cannot dial it: give an address or the name of this machine")
        return value


class RouterSettings(_Section):
    """The router and its OpenAI-compatible HTTP API."""

    host: str = Field(
        "127.0.0.1",
        description="Address on which it listens; 0.0.0.0 for all IPv4 addresses, :: for IPv6 as well.",
    )
    port: Port = Field(8000, description="TCP port on which it listens.")
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that serve the port together, each on a core of its own. They share the "
        "limits below: docs/limits.md.",
    )
    api_key: SecretStr | None = Field(
        None,
        description="Key that clients must send as a bearer token: docs/limits.md.",
    )
    api_key_file: str = Field("", description="File with several keys, one per line, instead of api_key.")
    keys_file: str = Field(
        "",
        description="YAML file of keys with tenants and limits, instead of api_key (docs/tenants.md). "
        "Changes take effect without a restart.",
    )
    keys_store: str = Field(
        "",
        repr=False,
        description="A Redis, as in scheduler.store: routers that share it enforce limits together. Without "
        "a keys_file it also holds the keys.",
    )
    keys_store_password_file: str = Field(
        "", description="File with that Redis' password, instead of a password in its URL."
    )
    metrics_open: bool = Field(False, description="Serve /metrics without a key.")
    metrics_port: Port = Field(
        0,
        description="Port of the same metrics without a key, on the host; 0 takes a free one on loopback. "
        "Of several processes each has one more, with its own metrics.",
    )
    request_timeout_s: Seconds = Field(
        600.0,
        description="A request that takes longer ends with an error. A client may set less with the header "
        "`X-Request-Timeout` (seconds).",
    )
    max_waiting: int = Field(
        2048,
        ge=0,
        description="Most requests that wait for room on the workers; more get 503. 0: none waits.",
    )
    max_wait_s: Seconds = Field(
        300.0,
        description="Longest wait for room, within the request's own deadline; then it gets 503.",
    )
    drain_timeout_s: Seconds = Field(10.0, description="After SIGTERM, running streams may take this long.")
    max_attempts: int = Field(
        4,
        ge=1,
        le=10,
        description="A request fails after this many workers in a row failed it without progress.",
    )
    replace_wait_s: Seconds = Field(
        60.0, description="A request whose worker failed waits this long for another one, then it fails."
    )
    journal_mib: int = Field(
        256,
        ge=1,
        description="Memory for the state from which requests continue on another worker; beyond, 503.",
    )
    max_body_mib: int = Field(
        8, ge=1, le=1024, description="Largest body of a request, in MiB; a larger one gets 413."
    )
    max_sequences: int = Field(
        256, ge=1, description="Most sequences of one request (prompts times n); more get 400."
    )
    max_connections: int = Field(
        4096, ge=1, description="Most connections of clients at a time; a request on a further one gets 503."
    )
    slow_client_s: Seconds = Field(
        30.0,
        description="A client that takes longer to send its request, or receives nothing of its response for "
        "this long, is disconnected: docs/limits.md.",
    )
    keep_alive_s: Seconds = Field(
        120.0,
        description="A connection without a request is closed after this long. Clients and proxies should "
        "close theirs sooner, or requests sent at that moment are lost: docs/proxies.md.",
    )
    chat_template: str = Field(
        "", description="Chat template, as a file or text; the model's own by default (docs/frontend.md)."
    )
    enable_prompt_tokens_details: bool = Field(
        False, description="Report the number of cached prompt tokens in `usage`."
    )
    enable_force_include_usage: bool = Field(
        False, description="Send `usage` with every stream, also where the client did not request it."
    )
    frontend: dict[str, Any] = Field(
        default_factory=dict,
        description="Further front-end arguments, by vLLM's names: docs/frontend.md.",
    )
    flush_ms: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="A stream's tokens wait this long for more, to be sent together, which costs less. The "
        "first and the last do not wait. 0: none waits.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Log level of the HTTP server; info logs each request: docs/observability.md."
    )

    @property
    def has_tenants(self) -> bool:
        """Whether keys belong to tenants, with limits."""
        return bool(self.keys_file or self.keys_store)

    @property
    def url(self) -> str:
        """The URL by which a process of the same machine reaches it."""
        return f"http://{addresses.from_here(addresses.join(self.host, self.port))}"

    @field_validator("keys_store")
    @classmethod
    def _is_redis(cls, value: str) -> str:
        if value and not is_redis(value):
            raise ValueError(f"use {KINDS}")
        return value

    @model_validator(mode="after")
    def _enough_for_all_processes(self) -> RouterSettings:
        for field in ("max_connections", "journal_mib"):
            if getattr(self, field) < self.processes:
                raise ValueError(f"{field} is shared by the processes: it must be at least their number")
        if self.metrics_port + self.processes > 1 << 16:
            raise ValueError("metrics_port is the first of as many ports as there are processes: choose less")
        return self

    @model_validator(mode="after")
    def _one_source_of_keys(self) -> RouterSettings:
        if self.api_key and self.api_key_file:
            raise ValueError("api_key and api_key_file exclude each other: leave one out")
        if (self.api_key or self.api_key_file) and self.has_tenants:
            raise ValueError("keys_file and keys_store replace api_key and api_key_file: leave those out")
        return self

    @model_validator(mode="after")
    def _one_password(self) -> RouterSettings:
        if self.keys_store_password_file and has_password(self.keys_store):
            raise ValueError(
                "a password in keys_store and a keys_store_password_file exclude each other: leave one out"
            )
        return self

    @field_serializer("api_key", when_used="json-unless-none")
    def _masked_or_not(self, key: SecretStr, info: SerializationInfo) -> str:
        return key.get_secret_value() if info.context == REVEAL else str(key)


class SecuritySettings(_Section):
    """Security between the parts of a deployment: docs/security.md."""

    tls: bool = Field(
        False,
        description="Mutual TLS between all processes, each with a certificate that says what it may do. The "
        "same on all of them.",
    )
    ca: str = Field(
        "~/.baton/ca",
        description="Folder of the CA (`baton ca init`), on its own machine: processes there get their "
        "certificates from it directly. `baton up` makes one if there is none.",
    )
    join: Address = Field(
        "", description="host:port of `baton ca serve`, where processes of other machines get certificates."
    )
    token: SecretStr | None = Field(
        None, description="Token (`baton ca token`) with which a process joins there."
    )
    token_file: str = Field("", description="File with the token, instead of token.")
    topic: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="Name of the deployment in its certificates; scheduler.topic if unset.",
    )
    folder: str = Field(
        "",
        description="Folder of this process's own tls.key, tls.crt and ca.crt. With security.join it keeps "
        "them there, by default in a temporary folder; without, somebody else puts and renews them there.",
    )
    insecure: bool = Field(
        False,
        description="Listen to other machines in plain text, without security.tls: only on a network where "
        "everybody may do everything.",
    )

    @model_validator(mode="after")
    def _is_on_where_it_is_meant(self) -> SecuritySettings:
        given = [key for key in ("join", "token", "token_file", "folder") if getattr(self, key)]
        if given and not self.tls:
            raise ValueError(f"{' and '.join(given)} without tls: turn security.tls on, or leave them out")
        if self.tls and self.insecure:
            raise ValueError("tls and insecure exclude each other: leave one out")
        tokens = [key for key in ("token", "token_file") if getattr(self, key)]
        if tokens and not self.join:
            raise ValueError(f"{tokens[0]} without join: give the address of `baton ca serve`")
        if len(tokens) > 1:
            raise ValueError("token and token_file exclude each other: leave one out")
        return self

    @field_serializer("token", when_used="json-unless-none")
    def _masked_or_not(self, token: SecretStr, info: SerializationInfo) -> str:
        return token.get_secret_value() if info.context == REVEAL else str(token)


class SloSettings(_Section):
    """The goals of autoscaling, for each request."""

    ttft_ms: float = Field(1_000.0, gt=0, description="Time to first token, from the request's arrival.")
    itl_ms: float = Field(100.0, gt=0, description="Mean gap between the tokens of an answer.")


class AutoscaleSettings(_Section):
    """Numbers of prefill and decode workers, chosen by the scheduler (docs/autoscaling.md)."""

    mode: Literal["off", "advise", "on"] = Field(
        "off", description="advise: log and show what `on` would do. on: do it."
    )
    min_prefill: int = Field(1, ge=1, description="Least prefill workers.")
    max_prefill: int = Field(4, ge=1, description="Most prefill workers.")
    min_decode: int = Field(1, ge=1, description="Least decode workers.")
    max_decode: int = Field(4, ge=1, description="Most decode workers.")
    interval_s: Seconds = Field(2.0, description="Time between two decisions.")
    down_after_s: Seconds = Field(
        120.0, description="A worker is taken away when fewer would have done for this long."
    )
    flip_after_s: Seconds = Field(
        5.0,
        description="A worker changes its role when the other side is short and its own could have spared it "
        "for this long; then it keeps the new one for as long.",
    )

    @model_validator(mode="after")
    def _least_is_not_above_most(self) -> AutoscaleSettings:
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if least > most:
                raise ValueError(f"min_{role} ({least}) is above max_{role} ({most})")
        return self


class OpsSettings(_Section):
    """The live page of a router (docs/operations.md)."""

    listen: Address | None = Field(
        None,
        description="host:port of the live page, /ops; empty: none. If unset, `baton up` serves it on "
        "loopback, next to router.port; other routers serve none.",
    )
    key: SecretStr | None = Field(
        None, description="Key that the page asks for; needed where it listens to other machines."
    )
    key_file: str = Field("", description="File with the key, instead of key.")

    @model_validator(mode="after")
    def _one_key(self) -> OpsSettings:
        if self.key and self.key_file:
            raise ValueError("key and key_file exclude each other: leave one out")
        return self

    @field_serializer("key", when_used="json-unless-none")
    def _masked_or_not(self, key: SecretStr, info: SerializationInfo) -> str:
        return key.get_secret_value() if info.context == REVEAL else str(key)


class TracingSettings(_Section):
    """Traces of requests, written by the router with OpenTelemetry (docs/tracing.md)."""

    endpoint: str = Field(
        "",
        description="Collector: http://host:4317 for OTLP over gRPC, http://host:4318/v1/traces (any path) "
        "for OTLP over HTTP; https:// for TLS. Unset: no traces.",
    )
    headers: dict[str, str] = Field(
        default_factory=dict, repr=False, description="Headers of each export, as for an API key."
    )
    sample_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the traces that begin here to be kept; a client's own trace is kept if the "
        "client says so. Errors, retried and slow requests always are.",
    )
    slow_ms: float = Field(
        2_000.0, gt=0, description="A request whose first token takes longer is always traced."
    )

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        found = re.fullmatch(r"https?://([^/\s?]+)[^\s?]*(\?\S*)?", value)
        if value and not found:
            raise ValueError("use http://host:4317 (gRPC), http://host:4318/v1/traces (HTTP), or https://")
        if found and ("@" in found[1] or found[2]):
            raise ValueError("a URL is logged: put a user, a password or a key into tracing.headers")
        return value


class FleetSettings(_Section):
    """The workers of one machine, as `baton up` and `baton node` start them."""

    devices: list[GpuName] | None = Field(
        None,
        min_length=1,
        description="GPUs in the order in which workers take them, by index or UUID. A GPU that is named "
        "several times is shared by as many workers: docs/operations.md. If unset, each worker has GPUs of "
        "its own, of those in CUDA_VISIBLE_DEVICES or of all.",
    )


class ModelSettings(_Section):
    """One of several models behind one router: its workers, and what differs from the sections at the top."""

    prefill: int | None = Field(
        None, ge=0, description="Prefill workers of `baton up`; 1 if unset, or 0 with mixed ones."
    )
    decode: int | None = Field(
        None, ge=0, description="Decode workers of `baton up`; 1 if unset, or 0 with mixed ones."
    )
    mixed: int = Field(0, ge=0, description="Mixed workers of `baton up`.")
    engine: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Keys of `engine`; served_model_name is the entry's."
    )
    scheduler: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Keys of `scheduler`. By default topic is that at the top, a dot and the model's name, "
        "and the ports are those at the top plus the entry's place: 0 for the first.",
    )
    worker: dict[str, Any] = Field(default_factory=dict, description="Keys of `worker`.")
    handoff: dict[str, Any] = Field(default_factory=dict, description="Keys of `handoff`.")
    autoscale: dict[str, Any] = Field(default_factory=dict, description="Keys of `autoscale`.")
    slo: dict[str, Any] = Field(default_factory=dict, description="Keys of `slo`.")
    router: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of `router` about requests to one model: chat_template, frontend, flush_ms, "
        "enable_*, max_attempts, max_sequences, max_wait_s, max_waiting, replace_wait_s, request_timeout_s.",
    )


class Settings(BaseSettings):
    """The whole tree. Build it with `load`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        case_sensitive=False,
        hide_input_in_errors=True,
    )

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
    log_format: Literal["text", "json"] = "text"

    @property
    def deployment(self) -> str:
        """The name of the deployment in its certificates."""
        return self.security.topic or self.scheduler.topic

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_default(cls, value: Any) -> Any:
        return {} if value is None else value  # an empty section in YAML

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        path = _config_file.get("path")
        from_file = [YamlConfigSettingsSource(settings_cls, yaml_file=path)] if path else []
        return (init_settings, env_settings, *from_file)


Tree = TypeVar("Tree", bound=Settings)
Section = TypeVar("Section", bound=_Section)
_NO_MAPPING = (
    "it must be a mapping of sections (as 'engine:'), each a mapping of keys, all of them plain text"
)
_config_file: dict[str, Path | None] = {"path": None}  # pydantic-settings passes no arguments to its sources


def load(
    flags: Mapping[str, Any] | None = None,
    config_file: str | None = None,
    tree: type[Tree] = Settings,  # type: ignore[assignment]
) -> Tree:
    """Read the configuration, as `tree`: Settings, or a subclass with more sections.

    `flags` holds the command line's values by section; None counts as not given. Raises ConfigError with one
    line per invalid key: its place and name, its value unless that may be a secret, and what is allowed.
    """
    _refuse_unknown_environment(tree)
    name = config_file or os.environ.get(ENV_CONFIG_FILE)
    if name and not Path(name).is_file():
        why = "is a folder" if Path(name).is_dir() else "does not exist"
        raise ConfigError(f"configuration file {name!r} {why}; pass an existing file with --config")
    if name:
        _check_mapping(name)
    _config_file["path"] = Path(name) if name else None
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        if isinstance(values, Mapping)
        else values
        for section, values in (flags or {}).items()
    }
    try:
        return tree(**{section: values for section, values in given.items() if values})  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(_explain(error, tree)) from None
    except SettingsError:  # raised for the environment; it names the section only
        raise ConfigError(f"{' or '.join(_no_json(tree))}: the value is not valid JSON") from None
    except (ValueError, TypeError):  # raised for a file whose keys are not text
        raise ConfigError(f"configuration file {name!r}: {_NO_MAPPING}") from None
    finally:
        _config_file["path"] = None


def keys(*path: str, tree: type[Settings] = Settings) -> list[str]:
    """Return the keys at a path of sections, without a path those at the top; none for a plain value."""
    model: Any = tree
    parts = iter(path)
    for part in parts:
        field = model.model_fields.get(part)
        own = ClassSettings if model is ClassesSettings else None  # a class of the file's own
        model = section_of(field.annotation) if field else own
        if model is None:
            return []
        if field and get_origin(field.annotation) is dict:
            next(parts, None)  # the name of one of several
    return list(model.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a key of this type holds, also an optional one; None for a plain value."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _check_mapping(name: str) -> None:
    """Raise ConfigError for a file that is not YAML or no mapping: pydantic-settings explains it badly."""
    try:
        with Path(name).open() as file:
            found = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {name!r} cannot be read: {error}") from None
    except (yaml.YAMLError, *NOT_YAML) as error:
        raise ConfigError(f"configuration file {name!r} is not valid YAML: {_where(error)}") from None
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"configuration file {name!r}: {_NO_MAPPING}")
    if twice := _named_twice(Path(name).read_text(), "models"):
        raise ConfigError(f"configuration file {name!r}: models.{twice} is there twice: give each a name")


def _named_twice(text: str, section: str) -> str:
    """Return the first key that a section of a YAML mapping has twice; YAML would keep the last one."""
    root = yaml.compose(text, yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == section and isinstance(value, yaml.MappingNode):
            names = [one.value for one, _ in value.value]
            return next((name for name in names if names.count(name) > 1), "")
    return ""


def laid_over(section: Section, values: Mapping[str, Any], name: str, where: str) -> Section:
    """Return a section, of this name, with some of its keys replaced, each as a whole.

    where: it is so, for messages. Raises ConfigError.
    """
    kind = type(section)
    given = {key: getattr(section, key) for key in kind.model_fields} | dict(values)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = [dict(one) | {"loc": (name, *one["loc"])} for one in error.errors()]
        problems = "; ".join(_explain_one(one, Settings) for one in found)
        raise ConfigError(f"{where}: {problems}") from None


def _refuse_unknown_environment(tree: type[Settings]) -> None:
    """Raise ConfigError for a variable that names no key: pydantic-settings ignores a misspelt one."""
    for name in os.environ:
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG_FILE:
            continue
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if section == "models":
            raise ConfigError(
                f"environment variable {name}: models are named in the configuration file alone"
            )
        top = keys(tree=tree)
        if section not in top:
            raise ConfigError(
                f"environment variable {name}: unknown section {section!r}{suggest(section, top)}"
            )
        if key and key.split("__")[0] not in (known := keys(section, tree=tree)):
            raise ConfigError(f"environment variable {name}: unknown key {key!r}{suggest(key, known)}")


def _no_json(tree: type[Settings]) -> list[str]:
    """List the variables of sections, mappings and lists whose values are not the JSON they must be."""
    wrong = []
    for name, value in os.environ.items():
        kind: Any = tree
        if not name.startswith(ENV_PREFIX):
            continue
        for part in name.removeprefix(ENV_PREFIX).lower().split("__"):
            section = section_of(kind)
            field = section.model_fields.get(part) if section else None
            kind = field.annotation if field else None
        if section_of(kind) or {dict, list, tuple} & {get_origin(one) for one in (kind, *get_args(kind))}:
            try:
                json.loads(value)
            except ValueError:
                wrong.append(name)
    return wrong


def _explain(error: ValidationError, tree: type[Settings]) -> str:
    return "; ".join(_explain_one(dict(one), tree) for one in error.errors())


def _explain_one(one: dict[str, Any], tree: type[Settings]) -> str:
    location = [str(part) for part in one["loc"]]
    message = one["msg"].removeprefix("Value error, ")
    if one["type"] == "extra_forbidden":
        # The value of a misspelt key may be a secret, and so may the text after `key:` without a blank.
        location[-1] = _UP_TO_A_VALUE.split(location[-1])[0]
        return f"unknown key {'.'.join(location)!r}{suggest(location[-1], keys(*location[:-1], tree=tree))}"
    where = ".".join(location)
    if one["type"] == "model_type":
        return f"{where} is a section: it must be a mapping of keys ({', '.join(keys(*location, tree=tree))})"
    if one["type"] == "value_error" and keys(*location, tree=tree):  # about several keys of a section
        return f"{where}: {message}"
    if _may_be_shown(location, one["input"], tree):
        return f"{where}: value {one['input']!r} is not allowed: {message}"
    return f"{where} is not allowed: {message}"


_UP_TO_A_VALUE = re.compile(r"[^\w.-]")


def _may_be_shown(location: list[str], value: Any, tree: type[Settings]) -> bool:
    """Return whether this is a plain value and not secret; whole sections contain secrets."""
    model: type[BaseModel] = tree
    for part in location:
        field = model.model_fields.get(part)
        if field is None:
            return False
        inner = section_of(field.annotation)
        if inner is None:
            if isinstance(value, str) and "://" in value and not {"@", "?"}.isdisjoint(value):
                return False  # a URL with a user or a query: either may be a key
            return tuple(location[:2]) not in SECRET and isinstance(value, str | int | float)
        model = inner
    return False


def suggest(word: str, allowed: list[str]) -> str:
    """Return the end of a message: the word that may be meant, and all that are allowed."""
    close = difflib.get_close_matches(word, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint}; allowed: {', '.join(allowed)}"


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_MARK = len("'\\t'")  # a quoted character or two: too short for a secret


def _where(error: Exception) -> str:
    """Return YAML's own message with its place, without what it quotes of the file: that may be a secret."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "a value does not match its tag"
    problem = _QUOTED.sub(
        lambda quoted: quoted[0] if len(quoted[0]) <= _MARK or quoted[0][1] == "<" else "'...'",
        getattr(error, "problem", None) or "it cannot be read",
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
