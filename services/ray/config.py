"""The configuration of a deployment on Ray: Baton's own tree, and three sections in Ray Serve LLM's words.

`prefill_config` and `decode_config` have the fields of Ray's LLMConfig that mean something here, so that one
who serves with `ray.serve.llm` finds the words that he knows. Their engine_kwargs are laid over `engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from baton.services import credentials, roles
from baton.services.config import REVEAL, EngineSettings, SecuritySettings, Settings, load
from baton.services.decode.proposers import validation
from baton.services.engine.args import check_model, served_model_name
from baton.services.errors import ConfigError, one_line
from baton.services.fleet.devices import cpu_build

WORKER_ROLES = ("prefill", "decode")
TYPE_SHARE = 0.001  # of a node's `accelerator_type:` resource: it is a mark, and takes nothing away
# Keys of engine_kwargs that Ray's prefill and decode need and Baton does itself.
_DONE_HERE = ("kv_transfer_config",)

Amount = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_default(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        return field.get_default(call_default_factory=True) if value is None else value


class ModelLoading(_Section):
    """The model, as Ray names it."""

    model_id: str = Field("", description="Model name in the API.")
    model_source: str = Field(
        "", description="A folder in Hugging Face's layout, or a name there; model_id if unset."
    )


class Autoscaling(_Section):
    """Bounds of the number of workers or routers."""

    min_replicas: int = Field(1, ge=0, description="Fewest.")
    max_replicas: int | None = Field(None, ge=1, description="Most; any number if unset.")
    initial_replicas: int | None = Field(None, ge=0, description="At the start; min_replicas if unset.")

    @model_validator(mode="after")
    def _in_order(self) -> Autoscaling:
        if problem := self.why_not(self.initial):
            raise ValueError(f"{problem} (initial_replicas)")
        return self

    @property
    def initial(self) -> int:
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    def why_not(self, number: int) -> str:
        """Return why there cannot be so many, "" if there can."""
        if number < self.min_replicas:
            return f"{number} is less than min_replicas ({self.min_replicas})"
        if self.max_replicas is not None and number > self.max_replicas:
            return f"{number} is more than max_replicas ({self.max_replicas})"
        return ""


class Deploying(_Section):
    """The number of workers or routers."""

    num_replicas: int | None = Field(None, ge=0, description="A fixed number; 1 if unset.")
    autoscaling_config: Autoscaling | None = Field(
        None, description="Bounds within which the number may be changed."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Deploying:
        if self.num_replicas is not None and self.autoscaling_config:
            raise ValueError("num_replicas and autoscaling_config exclude each other: leave one out")
        return self

    @property
    def initial(self) -> int:
        if self.autoscaling_config:
            return self.autoscaling_config.initial
        return 1 if self.num_replicas is None else self.num_replicas

    def why_not(self, number: int) -> str:
        """Return why there cannot be so many, "" if there can."""
        return self.autoscaling_config.why_not(number) if self.autoscaling_config else ""


class Placing(_Section):
    """The room of one worker. It lies on one node as a whole, so bundles are added up."""

    bundles: list[dict[str, Amount]] = Field(default_factory=list, description="Resources by Ray's names.")
    bundle_per_worker: dict[str, Amount] = Field(
        default_factory=dict, description="The same for each rank, instead of bundles."
    )
    strategy: Literal["PACK", "STRICT_PACK"] = Field(
        "STRICT_PACK", description="A worker's ranks share a node in either."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Placing:
        if self.bundles and self.bundle_per_worker:
            raise ValueError("bundles and bundle_per_worker exclude each other: leave one out")
        return self


class Workers(_Section):
    """The workers of one role."""

    model_loading_config: ModelLoading = Field(default_factory=ModelLoading)
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Engine arguments, laid over the section `engine`."
    )
    accelerator_type: str = Field("", description="The nodes' accelerator, by Ray's name, e.g. H100.")
    label_selector: dict[str, str] = Field(default_factory=dict, description="Labels that nodes must have.")
    placement_group_config: Placing = Field(default_factory=Placing)
    deployment_config: Deploying = Field(default_factory=Deploying)
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Ray's runtime environment of the workers."
    )


class Routers(_Section):
    """The routers: at most one a node, the first where the deployment was started."""

    deployment_config: Deploying = Field(default_factory=Deploying)


class Security(SecuritySettings):
    """Security between the parts, which speak TLS unless `insecure` is set."""

    @model_validator(mode="before")
    @classmethod
    def _tls_unless_insecure(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tls" not in values:
            insecure = str(values.get("insecure", "")).lower() in ("1", "true", "yes", "on")
            values = {**values, "tls": not insecure}
        return values


class ClusterSettings(Settings):
    """The whole tree of a deployment on Ray."""

    security: Security = Field(default_factory=Security)
    prefill_config: Workers = Field(default_factory=Workers)
    decode_config: Workers = Field(default_factory=Workers)
    router_config: Routers = Field(default_factory=Routers)

    @property
    def model(self) -> str:
        """The model's name in the API."""
        return served_model_name(self.engine_of("decode"))

    def workers(self, role: str) -> Workers:
        return self.prefill_config if role == "prefill" else self.decode_config

    def deploying(self, part: str) -> Deploying:
        """Return the numbers of a role's workers, or of the routers."""
        return (
            self.router_config.deployment_config if part == "router" else self.workers(part).deployment_config
        )

    def engine_of(self, role: str) -> EngineSettings:
        """Return the engine of a role's workers. Raises ConfigError."""
        section, group = f"{role}_config", self.workers(role)
        values = self.engine.model_dump(exclude_unset=True)
        values["extra"] = dict(values.get("extra", {}))
        loading = group.model_loading_config
        if loading.model_id or loading.model_source:
            values |= {
                "model": loading.model_source or loading.model_id,
                "served_model_name": loading.model_id,
            }
        for key, value in group.engine_kwargs.items():
            if key in _DONE_HERE:
                continue
            into = values if key in EngineSettings.model_fields else values["extra"]
            into[key] = value
        try:
            return EngineSettings(**values)
        except ValidationError as error:
            raise ConfigError(f"{section}.engine_kwargs: {one_line(error)}") from None

    def bundle(self, role: str) -> dict[str, float]:
        """Return what one worker of a role reserves on its node, by Ray's names."""
        group, ranks = self.workers(role), self.engine_of(role).tensor_parallel_size
        placing = group.placement_group_config
        bundles = placing.bundles or [placing.bundle_per_worker] * ranks
        total: dict[str, float] = {}
        for bundle in bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        total = {name: amount for name, amount in total.items() if amount}
        if not total:
            total = {"CPU": float(ranks)} if cpu_build() else {"CPU": 1.0, "GPU": float(ranks)}
        if group.accelerator_type:
            total[f"accelerator_type:{group.accelerator_type}"] = TYPE_SHARE
        return total

    def tree_of(self, role: str) -> dict[str, Any]:
        """Return Baton's own tree for a part of a role, with secrets, as JSON has it. Raises ConfigError."""
        tree = {
            name: getattr(self, name).model_dump(mode="json", context=REVEAL)
            for name, field in Settings.model_fields.items()
            if hasattr(field.annotation, "model_fields")
        }
        worker = role if role in WORKER_ROLES else "decode"
        tree["engine"] = self.engine_of(worker).model_dump(mode="json", context=REVEAL)
        return tree | {"log_format": self.log_format}

    def check(self) -> None:
        """Raise ConfigError for what can be seen to be wrong before anything starts."""
        if not (self.security.tls or self.security.insecure):
            raise ConfigError("security: turn tls on, or set insecure on a network that is trusted")
        for key in ("join", "token", "token_file", "folder"):
            if getattr(self.security, key):
                raise ConfigError(
                    f"security.{key}: leave it out; on Ray the CA is where `baton ray up` runs (security.ca)"
                )
        names = set()
        for role in WORKER_ROLES:
            engine = self.engine_of(role)
            check_model(engine)
            validation.check(engine)
            roles.check(roles.role(role), self)
            if not self.deploying(role).initial:
                raise ConfigError(f"{role}_config.deployment_config: at least one worker is needed to start")
            if self.bundle(role).get("GPU", ranks := engine.tensor_parallel_size) != ranks:
                raise ConfigError(
                    f"{role}_config.placement_group_config: {self.bundle(role)['GPU']:g} GPUs, but "
                    f"engine.tensor_parallel_size is {ranks}: give as many"
                )
            names.add((engine.model, engine.served_model_name))
        if len(names) > 1:
            raise ConfigError(
                "prefill_config and decode_config name different models: give both the same one"
            )
        if not self.deploying("router").initial:
            raise ConfigError("router_config.deployment_config: at least one router is needed")
        credentials.check(self)


def read(config: str | Path | Mapping[str, Any]) -> ClusterSettings:
    """Read cluster.yaml, or take what it holds, and check it. Raises ConfigError."""
    if isinstance(config, Mapping):
        settings = load(config, None, ClusterSettings)
    else:
        settings = load({}, str(config), ClusterSettings)
    settings.check()
    return settings
