"""The configuration: one tree of settings for every process of a deployment.

A value is taken from the first place that has it: command-line flag, environment (`BATON_SECTION__KEY`),
YAML file (`--config`, or BATON_CONFIG), default. An unknown key is refused wherever it stands.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
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
from baton.scheduler.store_url import has_password
from baton.services.errors import ConfigError
from baton.services.speculation import SpeculativeSettings

ENV_PREFIX = "BATON_"
ENV_CONFIG_FILE = "BATON_CONFIG"  # names the YAML file, as --config does
OFF = ("none", "null", "")  # words for a section that is not to be
# What these keys hold is never shown: not by an error, not in a process's title.
SECRET = {("router", "api_key"), ("scheduler", "store"), ("engine", "extra")}
REVEAL = {"secrets": True}  # the context of a dump that shall hold them, for another process of ours
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
RoleName = Literal["prefill", "decode", "mixed"]


def _address(value: str) -> str:
    """host:port, or several with commas between; what does not fit is refused before anything starts."""
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
    """Refuse a name under which neither Baton nor an installed package offers a handoff transport."""
    # Only where a configuration names transports: what they are made of takes as long to import as all of
    # this.
    from baton.handoff.errors import HandoffError
    from baton.handoff.transports import REGISTRY

    try:
        REGISTRY.check([value])
    except HandoffError as error:
        raise ValueError(str(error)) from None
    return value


TransportName = Annotated[str, AfterValidator(_transport)]


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
    """What the engine of every worker runs, and what the router must know of it."""

    model: str = Field("", description="Model folder or name, in Hugging Face's layout.")
    served_model_name: str = Field("", description="Name in the API; the model's own by default.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and KV cache; the model's own by default."
    )
    max_model_len: int | None = Field(None, ge=16, description="Tokens of prompt and answer together.")
    block_size: int | None = Field(
        None,
        ge=1,
        description="Tokens a KV block. If unset: vLLM's default on a GPU; on a CPU 32, for MLA 16.",
    )
    kv_cache_gib: float | None = Field(None, gt=0, description="KV cache of one worker, GiB.")
    max_num_seqs: int = Field(64, ge=1, description="Requests in one batch.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=32,
        description="Tokens in one engine step. If unset: vLLM's default on a GPU; on a CPU 256, or more "
        "where the largest batch needs it, as what is in a step makes others wait.",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks, one GPU each, of one worker.")
    enable_prefix_caching: bool = Field(True, description="Keep the KV of prompts that share a beginning.")
    seed: int = Field(0, description="Of the engines' random numbers.")
    tool_call_parser: str | None = Field(
        None, description="vLLM's name of the tool-call parser, e.g. hermes."
    )
    reasoning_parser: str = Field(
        "", description="vLLM's name of the parser of a model's reasoning, e.g. deepseek_r1."
    )
    speculative_config: SpeculativeSettings | None = Field(
        None,
        description="Speculative decoding (docs/speculative-decoding.md). The flag replaces the file's as a "
        "whole; 'none' turns it off.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,  # a token of Hugging Face's may be in it
        description="Further engine arguments, by vLLM's own names (AsyncEngineArgs).",
    )

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _off_or_plain(cls, value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in OFF:
            return None
        return dict(value) if isinstance(value, MappingProxyType) else value


class PolicySettings(_Section):
    """Who is chosen for a request: classes by their registered names (scheduler/policy)."""

    filters: list[str] = ["placeable", "same_revision", "not_excluded", "fits", "room"]
    pair_filters: list[str] = ["compatible"]
    scorers: dict[str, Annotated[float, Field(gt=0)]] = {
        "queued_prompt_tokens": 1.0,
        "staging_room": 1.0,
        "running_requests": 1.0,
        "free_blocks": 1.0,
    }
    picker: str = "power_of_two"


class SchedulerSettings(_Section):
    """The scheduler's own settings, and how others reach it."""

    address: Address = Field(
        "127.0.0.1:7400",
        min_length=1,
        description="host:port where it listens. Where others find it: one, or several with commas between.",
    )
    store: str = Field(
        "memory",
        repr=False,
        description="memory, redis://[:password@]host:port/db, or rediss:// for TLS.",
    )
    store_password_file: str = Field(
        "", description="File with the store's password, in place of one in its URL."
    )
    topic: str = Field("baton", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Namespace in a shared store.")
    heartbeat_s: Seconds = Field(1.0, description="Workers send one this often.")
    worker_lease_s: Seconds = Field(5.0, description="A worker not heard of for this long is dead.")
    placement_lease_s: Seconds = Field(15.0, description="A placement not renewed for this long is released.")
    max_queued_prompt_tokens: int = Field(
        32_768, ge=1, description="Prompt tokens placed on one prefill worker and not yet read; more is 503."
    )
    max_queue_factor: float = Field(
        1.25,
        ge=1,
        description="Requests placed on one decode worker, as a multiple of its max_num_seqs: those above 1 "
        "are prefilled meanwhile, and take over a slot when it comes free. More wait in the router.",
    )
    handoff_min_tokens: int = Field(
        0, ge=0, description="Shorter prompts are read by the decode worker itself, without a handoff."
    )
    idle_decode_tokens: int = Field(
        8_192,
        ge=0,
        description="Prompt tokens that a decode worker which runs nothing prefills itself while prefill "
        "workers queue, as at the beginning of a burst; 0: none.",
    )
    rebalance_after_s: Seconds | None = Field(
        None,
        description="A worker changes sides when the prefill or the decode side was short of workers for so "
        "long while the other had one to spare; never if unset.",
    )
    metrics_port: Port | None = Field(
        None, description="Prometheus metrics over HTTP; off if unset, 0 takes a free one."
    )
    policy: PolicySettings = Field(
        default_factory=PolicySettings, description="Names of filters, scorers (with weights) and picker."
    )

    @field_validator("store")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value != "memory" and not value.startswith(("redis://", "rediss://")):
            raise ValueError("use memory, redis:// or rediss://")
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
            raise ValueError("a password in store and a store_password_file are too much: leave one out")
        return self

    def check_shared(self) -> None:
        """Raises ConfigError for several schedulers without a store that they share. For who runs a part: an
        operator's question needs their addresses alone.
        """
        if "," in self.address and self.store == "memory":
            raise ConfigError(
                f"scheduler.address names several schedulers ({self.address}) and scheduler.store is memory: "
                "each would know its own workers alone; set scheduler.store to the Redis that they share, or "
                "name one scheduler"
            )


class HandoffSettings(_Section):
    """How KV travels between workers."""

    enabled: bool | None = Field(
        None,
        description="Whether workers hand KV over. If unset, they do, but for those of a deployment that is "
        "started whole (baton up, offline) with mixed workers alone. Without, layers with a sliding window "
        "keep no more than that, nothing is held back for handoffs, and a worker stays a mixed one.",
    )
    transports: list[TransportName] = Field(
        ["shm", "grpc"],
        min_length=1,
        description="Offered by a worker, best first; both ends choose a common one. Other packages may add "
        "some (docs/adding-a-transport.md).",
    )
    host: str = Field(
        "",
        description="Address on which KV is served; that of worker.listen by default. Others are told this "
        "one, or the host that the worker advertises where it is unset, 0.0.0.0 or ::.",
    )
    port: Port = Field(
        0,
        description="TCP port on which KV is served; rank r of a tensor-parallel worker takes port + r. 0 "
        "takes free ones.",
    )
    staging_mib: int | None = Field(
        None,
        ge=1,
        description="Saved KV that may wait to be pulled, MiB a rank. If unset, half of its KV cache, or one "
        "prompt of max_model_len where that is more, but at most a quarter of what /dev/shm has free.",
    )
    lease_s: Seconds = Field(30.0, description="Saved KV is kept this long for the decode worker.")
    pull_timeout_s: Seconds = Field(20.0, description="Deadline of one pull.")
    chunk_mib: int = Field(
        4, ge=1, le=32, description="Of one message of the grpc transport, or one look into shared memory."
    )
    kv_wire_dtype: Literal["auto", "fp8_e4m3", "int8"] = Field(
        "auto",
        description="How KV travels: auto as it is, the others at half the bytes and with an error "
        "(docs/handoff-wire.md). All workers must have the same.",
    )

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, value: str) -> str:
        host, port = addresses.split(value) if value else ("", 0)
        if port:
            raise ValueError("a host without a port; the port is handoff.port")
        return host


class WorkerSettings(_Section):
    """One worker's process."""

    listen: Address = Field(
        "127.0.0.1:0",
        description="host:port of its gRPC server; port 0 takes a free one, 0.0.0.0 and [::] all addresses.",
    )
    advertise: str = Field(
        "",
        description="host:port as others reach it, or the host alone. By default what it listens on; where "
        "that is all addresses, the one by which it reaches the scheduler.",
    )
    worker_id: str = Field(
        "",
        description="Unique name, also what a drain is remembered by; by default of role, host and process.",
    )
    metrics_port: Port | None = Field(
        None, description="Prometheus metrics over HTTP; off if unset, 0 takes a free one."
    )
    cpu: str = Field("", description="Cores to which the engine is pinned, as '0' or '0-3'; all by default.")
    acceptance_reference: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Accepted share of the first drafted position as it should be; learned if unset. "
        "Well below it an alarm is raised: docs/observability.md.",
    )
    drain_timeout_s: Seconds = Field(60.0, description="After SIGTERM, running requests may take this long.")
    engine_stall_s: Seconds = Field(
        300.0, description="An engine whose step takes longer hangs: the worker fails, others go on."
    )
    scheduler_wait_s: Seconds = Field(15.0, description="At start, wait this long for the scheduler.")

    @field_validator("advertise")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        if value and addresses.is_wildcard(addresses.split(value)[0]):
            raise ValueError("others cannot dial it: give an address of this machine, or its name")
        return value


class RouterSettings(_Section):
    """The OpenAI-compatible HTTP front."""

    host: str = Field("127.0.0.1", description="Address on which it listens; 0.0.0.0 for all.")
    port: Port = Field(8000, description="TCP port on which it listens.")
    api_key: SecretStr | None = Field(
        None,
        description="If set, clients must send it as a bearer token: docs/limits.md.",
    )
    api_key_file: str = Field(
        "", description="File with such keys, one a line; each of them opens. In place of api_key."
    )
    metrics_open: bool = Field(False, description="/metrics needs no key.")
    request_timeout_s: Seconds = Field(
        600.0,
        description="A request that takes longer ends with an error. A client may ask for less with the "
        "header `X-Request-Timeout` (seconds).",
    )
    max_waiting: int = Field(
        2048,
        ge=0,
        description="Requests that may wait for room on the workers; more is 503. 0: nobody waits.",
    )
    max_wait_s: Seconds = Field(
        300.0,
        description="A request waits this long for room, and no longer than its own deadline; then 503.",
    )
    drain_timeout_s: Seconds = Field(10.0, description="After SIGTERM, streams that run may take this long.")
    max_attempts: int = Field(
        3,
        ge=1,
        le=10,
        description="So many workers may fail under one request before it gets on; then it is an error.",
    )
    replace_wait_s: Seconds = Field(
        60.0, description="A request whose worker failed waits this long for another, then it is an error."
    )
    journal_mib: int = Field(
        256,
        ge=1,
        description="Kept of waiting and running requests, so that they can go on elsewhere; more is 503.",
    )
    max_body_mib: int = Field(8, ge=1, le=1024, description="Of one request's body; a larger one is 413.")
    max_sequences: int = Field(
        256, ge=1, description="Answers that one request may ask for (prompts times n); more is 400."
    )
    max_connections: int = Field(4096, ge=1, description="Of clients at once; a request on another is 503.")
    slow_client_s: Seconds = Field(
        30.0,
        description="A client that takes longer to send its request, or reads nothing of its answer for so "
        "long, is cut off: docs/limits.md.",
    )
    chat_template: str = Field(
        "", description="A file, or the template itself; the model's own by default (docs/frontend.md)."
    )
    enable_prompt_tokens_details: bool = Field(
        False, description="Tell in `usage` how many of the prompt's tokens were cached."
    )
    enable_force_include_usage: bool = Field(
        False, description="Send `usage` with every stream, also to clients that do not ask for it."
    )
    frontend: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of the front end, by vLLM's own names: docs/frontend.md.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Of the HTTP server; info writes a line a request: docs/observability.md."
    )

    @property
    def url(self) -> str:
        """Where a process of the same machine finds it."""
        return f"http://{addresses.from_here(addresses.join(self.host, self.port))}"

    @model_validator(mode="after")
    def _one_source_of_keys(self) -> RouterSettings:
        if self.api_key and self.api_key_file:
            raise ValueError("api_key and api_key_file are too much: leave one out")
        return self

    @field_serializer("api_key", when_used="json-unless-none")
    def _masked_or_not(self, key: SecretStr, info: SerializationInfo) -> str:
        return key.get_secret_value() if info.context == REVEAL else str(key)


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
    log_format: Literal["text", "json"] = "text"

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


_NO_MAPPING = (
    "it must be a mapping of sections, as 'engine:' is one, each a mapping of keys, all of them plain text"
)
_config_file: dict[str, Path | None] = {"path": None}  # pydantic-settings passes sources no argument


def load(flags: dict[str, dict[str, Any]] | None = None, config_file: str | None = None) -> Settings:
    """Read the configuration.

    `flags` holds the command line's values, section by section; None values count as not given.
    Raises ConfigError, one line a wrong key: where, which key, its value unless it may be a secret, what is
    allowed.
    """
    _refuse_unknown_environment()
    name = config_file or os.environ.get(ENV_CONFIG_FILE)
    if name and not Path(name).is_file():
        why = "is a folder" if Path(name).is_dir() else "does not exist"
        raise ConfigError(f"configuration file {name!r} {why}; pass an existing file with --config")
    if name:
        _check_mapping(name)
    _config_file["path"] = Path(name) if name else None
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in (flags or {}).items()
    }
    try:
        return Settings(**{section: values for section, values in given.items() if values})  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    except SettingsError:  # of the environment; it names the section alone
        raise ConfigError(f"{' or '.join(_no_json())}: the value is not valid JSON") from None
    except (ValueError, TypeError):  # of a file whose keys are no text
        raise ConfigError(f"configuration file {name!r}: {_NO_MAPPING}") from None
    finally:
        _config_file["path"] = None


def keys(*path: str) -> list[str]:
    """The allowed keys at `path`: none for the top, a section, a section within it. Empty where it ends."""
    model: Any = Settings
    for part in path:
        field = model.model_fields.get(part)
        model = section_of(field.annotation) if field else None
        if model is None:
            return []
    return list(model.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key of this type holds, optional ones included; None for a plain value."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _check_mapping(name: str) -> None:
    """What pydantic-settings does not say well of a file. Raises ConfigError."""
    try:
        with Path(name).open() as file:
            found = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {name!r} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"configuration file {name!r} is not valid YAML: {_where(error)}") from None
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"configuration file {name!r}: {_NO_MAPPING}")


def _refuse_unknown_environment() -> None:
    """pydantic-settings reads the names that it knows and ignores a misspelt one: we do not."""
    for name in os.environ:
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG_FILE:
            continue
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        top = keys()
        if section not in top:
            raise ConfigError(
                f"environment variable {name}: unknown section {section!r}{suggest(section, top)}"
            )
        if key and key.split("__")[0] not in keys(section):
            raise ConfigError(
                f"environment variable {name}: unknown key {key!r}{suggest(key, keys(section))}"
            )


def _no_json() -> list[str]:
    """Environment variables of sections, mappings and lists, whose values must be JSON and are not."""
    wrong = []
    for name, value in os.environ.items():
        kind: Any = Settings
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


def _explain(error: ValidationError) -> str:
    return "; ".join(_explain_one(dict(one)) for one in error.errors())


def _explain_one(one: dict[str, Any]) -> str:
    location = [str(part) for part in one["loc"]]
    message = one["msg"].removeprefix("Value error, ")
    if one["type"] == "extra_forbidden":
        # A value may be a secret whose key is misspelt, and so may be what follows `key:` without a blank.
        location[-1] = _UP_TO_A_VALUE.split(location[-1])[0]
        return f"unknown key {'.'.join(location)!r}{suggest(location[-1], keys(*location[:-1]))}"
    where = ".".join(location)
    if one["type"] == "model_type":
        return f"{where} is a section: it must be a mapping of keys ({', '.join(keys(*location))})"
    if one["type"] == "value_error" and keys(*location):  # of a section's keys together
        return f"{where}: {message}"
    if _may_be_shown(location, one["input"]):
        return f"{where}: value {one['input']!r} is not allowed: {message}"
    return f"{where} is not allowed: {message}"


_UP_TO_A_VALUE = re.compile(r"[^\w.-]")


def _may_be_shown(location: list[str], value: Any) -> bool:
    """Whether this is one plain value of a key that is no secret: whole sections have secrets in them."""
    model: type[BaseModel] = Settings
    for part in location:
        field = model.model_fields.get(part)
        if field is None:
            return False
        inner = section_of(field.annotation)
        if inner is None:
            return tuple(location[:2]) not in SECRET and isinstance(value, str | int | float)
        model = inner
    return False


def suggest(word: str, allowed: list[str]) -> str:
    """The end of a message: what may have been meant, and all that is allowed."""
    close = difflib.get_close_matches(word, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint}; allowed: {', '.join(allowed)}"


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_MARK = len("'\\t'")  # a mark of YAML's, or a character: too short for a secret


def _where(error: Exception) -> str:
    """Tell in YAML's own words what is wrong, and where; what it quotes of the source may be a secret."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "a value does not fit its tag"
    problem = _QUOTED.sub(
        lambda quoted: quoted[0] if len(quoted[0]) <= _MARK or quoted[0][1] == "<" else "'...'",
        getattr(error, "problem", None) or "it cannot be read",
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
