"""The configuration of a deployment on Ray: Baton's own tree, and sections with Ray Serve LLM's keys.

`prefill_config`, `decode_config` and `encode_config` have the fields of Ray's LLMConfig that apply here, so
that users of `ray.serve.llm` find familiar names. Their engine_kwargs override `engine`; those of
`encode_config` override the prefill workers' engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from baton.services import credentials, roles
from baton.services.config import (
    REVEAL,
    AutoscaleSettings,
    EngineSettings,
    SecuritySettings,
    Settings,
    load,
)
from baton.services.decode.proposers import validation
from baton.services.engine.args import check_model, served_model_name
from baton.services.errors import ConfigError, one_line
from baton.services.fleet import devices
from baton.services.fleet.devices import cpu_build
from baton.services.ray.sections import Deploying, Routers, Workers

SIDES = ("prefill", "decode")
WORKER_ROLES = (*SIDES, "encode")
TYPE_SHARE = 0.001  # amount of `accelerator_type:` that a worker requests; the resource only names the type
# Keys of engine_kwargs that Ray's own prefill and decode need and Baton sets itself.
_DONE_HERE = ("kv_transfer_config", "distributed_executor_backend", "data_parallel_backend")
# Keys of `fleet` that have other names on Ray, or do not apply there.
_ELSEWHERE = {
    "engines": "they are prefill_config.engine_kwargs and decode_config.engine_kwargs",
    "node_rank": "Ray chooses the nodes",
}
# vLLM's names of Baton's own keys.
_RENAMED = {"enable_expert_parallel": "expert_parallel", "nnodes": "nodes"}


class Security(SecuritySettings):
    """Security settings with TLS on unless `insecure` is set."""

    @model_validator(mode="before")
    @classmethod
    def _tls_unless_insecure(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tls" not in values:
            insecure = str(values.get("insecure", "")).lower() in ("1", "true", "yes", "on")
            values = {**values, "tls": not insecure}
        return values


class ClusterSettings(Settings):
    """All settings of a deployment on Ray."""

    security: Security = Field(default_factory=Security)
    prefill_config: Workers = Field(default_factory=Workers)
    decode_config: Workers = Field(default_factory=Workers)
    encode_config: Workers = Field(  # no workers unless it is given
        default_factory=lambda: Workers(deployment_config=Deploying(num_replicas=0))
    )
    router_config: Routers = Field(default_factory=Routers)

    @property
    def model(self) -> str:
        return served_model_name(self.engine_of("decode"))

    def workers(self, role: str) -> Workers:
        found: Workers = getattr(self, f"{role}_config")
        return found

    def deploying(self, part: str) -> Deploying:
        """Return the `deployment_config` of a worker role or of the routers."""
        return (
            self.router_config.deployment_config if part == "router" else self.workers(part).deployment_config
        )

    def engine_of(self, role: str) -> EngineSettings:
        """Return the engine settings of a role's workers. Raises ConfigError."""
        section, group = f"{role}_config", self.workers(role)
        encodes = role == roles.ENCODE.name
        values = (self.engine_of("prefill") if encodes else self.engine).model_dump(exclude_unset=True)
        values["extra"] = dict(values.get("extra", {}))
        loading = group.model_loading_config
        if loading.model_id or loading.model_source:
            values |= {
                "model": loading.model_source or loading.model_id,
                "served_model_name": [loading.model_id] if loading.model_id else [],
            }
        for given, value in group.engine_kwargs.items():
            if given in _DONE_HERE:
                continue
            key = _RENAMED.get(given, given)
            into = values if key in EngineSettings.model_fields else values["extra"]
            into[key] = value
        try:
            engine = EngineSettings(**values)
        except ValidationError as error:
            raise ConfigError(f"{section}.engine_kwargs: {one_line(error)}") from None
        return roles.encoder_engine(engine) if encodes else engine

    def bundle(self, role: str) -> dict[str, float]:
        """Return what one worker or gang of a role reserves on each of its nodes, by Ray's names."""
        group, engine = self.workers(role), self.engine_of(role)
        ranks = engine.ranks * engine.data_parallel_size
        placing = group.placement_group_config
        bundles = placing.bundles or [placing.bundle_per_worker] * ranks
        total: dict[str, float] = {}
        for bundle in bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount / engine.nodes
        total = {name: amount for name, amount in total.items() if amount}
        if not total:
            here = float(ranks // engine.nodes)
            total = {"CPU": here} if cpu_build() else {"CPU": float(engine.local_members), "GPU": here}
        if group.accelerator_type:
            total[f"accelerator_type:{group.accelerator_type}"] = TYPE_SHARE
        return total

    def tree_of(self, role: str) -> dict[str, Any]:
        """Return a part's settings as JSON, including secrets. Raises ConfigError."""
        tree = {
            name: getattr(self, name).model_dump(mode="json", context=REVEAL)
            for name, field in Settings.model_fields.items()
            if hasattr(field.annotation, "model_fields")
        }
        tree["autoscale"] = self.scaling.model_dump(mode="json")
        worker = role if role in WORKER_ROLES else "decode"
        tree["engine"] = self.engine_of(worker).model_dump(mode="json", context=REVEAL)
        return tree | {"log_format": self.log_format}

    @property
    def scaling(self) -> AutoscaleSettings:
        """The section `autoscale` with the limits from each role's autoscaling_config. Raises ConfigError."""
        own = self.autoscale
        if own.mode in ("off", "roles"):
            return own
        given = own.model_dump(exclude_unset=True)
        for role in WORKER_ROLES:
            given |= self._range_given(role)
        try:
            scaling = AutoscaleSettings(**given)
        except ValidationError as error:
            raise ConfigError(f"autoscale, autoscaling_config: {one_line(error)}") from None
        scaled = WORKER_ROLES if scaling.bounds("encode")[1] else SIDES
        for role in scaled if own.mode == "on" else ():
            least, most = scaling.bounds(role)
            if not least <= (first := self.deploying(role).initial) <= most:
                raise ConfigError(
                    f"{role}_config.deployment_config: it starts with {first}, but autoscaling keeps {least} "
                    f"to {most}: set autoscaling_config.initial_replicas"
                )
        return scaling

    def _range_given(self, role: str) -> dict[str, str]:
        """Return the key of `autoscale` if a role's deployment_config sets it. Raises ConfigError."""
        own, deploying = self.autoscale, self.deploying(role)
        section = f"{role}_config.deployment_config"
        scaled = role in SIDES or (own.bounds(role)[1] and deploying.num_replicas)
        if own.mode == "on" and scaled and deploying.num_replicas is not None:
            raise ConfigError(
                f"autoscale.mode is on and {section}.num_replicas fixes a number: "
                "give autoscaling_config with min_replicas and max_replicas instead"
            )
        limits = deploying.autoscaling_config
        if not limits or not limits.bounds:
            return {}
        bounds = dict(zip(("min", "max"), own.bounds(role), strict=True))
        for end, number in limits.bounds.items():
            said = f"{section}.autoscaling_config.{end}_replicas"
            if role in own.model_fields_set and bounds[end] != number:
                raise ConfigError(
                    f"autoscale.{role} is {getattr(own, role)} and {said} is {number}: leave one of them out"
                )
            if number < 1 and role in SIDES:
                raise ConfigError(f"{said} is 0: autoscaling keeps at least one worker on each side")
            bounds[end] = number
        return {role: f"{bounds['min']}-{bounds['max']}"}

    def bounds(self, role: str) -> tuple[int, int | None]:
        """Return the minimum and maximum number of a role's workers, None for any. Raises ConfigError."""
        scaling = self.scaling
        if self.autoscale.mode == "on" and (role in SIDES or scaling.bounds(role)[1]):
            return scaling.bounds(role)
        limits = self.deploying(role).autoscaling_config
        return (limits.min_replicas, limits.max_replicas) if limits else (0, None)

    @property
    def interchangeable(self) -> bool:
        """Whether both sides' workers have the same resources, environment and engine."""
        prefill, decode = (
            (self.bundle(role), self.workers(role).label_selector, self.workers(role).runtime_env)
            for role in SIDES
        )
        return prefill == decode and self.engine_of("prefill") == self.engine_of("decode")

    @property
    def unused(self) -> list[str]:
        """The given keys that only Ray Serve uses, with their sections."""
        return [
            f"{part}_config.deployment_config.autoscaling_config.{key}"
            for part in (*WORKER_ROLES, "router")
            if (limits := self.deploying(part).autoscaling_config)
            for key in limits.unused
        ]

    def check(self) -> None:
        """Raise ConfigError for mistakes that can be found before anything starts."""
        if self.models:
            raise ConfigError(
                "models: a deployment on Ray serves one model; leave the section out, and start one for each "
                "model (each with a scheduler.topic of its own), or use `baton up` (docs/models.md)"
            )
        if self.fleet.devices:
            raise ConfigError(
                "fleet.devices: on Ray a worker's GPUs are those of its bundle; leave it out, and let "
                "workers share a GPU by placement_group_config: {bundle_per_worker: {CPU: 1, GPU: 0.5}}"
            )
        for key, instead in _ELSEWHERE.items():
            if getattr(self.fleet, key):
                raise ConfigError(f"fleet.{key}: leave it out; on Ray {instead}")
        if not (self.security.tls or self.security.insecure):
            raise ConfigError("security: turn tls on, or set insecure on a trusted network")
        for key in ("join", "token", "folder"):
            if getattr(self.security, key):
                raise ConfigError(
                    f"security.{key}: leave it out; on Ray the CA is where `baton ray up` runs (security.ca)"
                )
        names = set()
        encodes = self.scaling.bounds("encode")[1] or self.deploying("encode").initial
        there = (*SIDES, *(["encode"] if encodes else []))
        for role in there:
            engine = self.engine_of(role)
            check_model(engine)
            validation.check(engine)
            roles.check(roles.role(role), self.model_copy(update={"engine": engine}))
            if role in SIDES and not self.deploying(role).initial:
                raise ConfigError(f"{role}_config.deployment_config: at least one worker is needed to start")
            self._check_gpus(role, engine)
            names.add((engine.model, *engine.served_model_name))
        if len(names) > 1:
            sections = " and ".join(f"{role}_config" for role in there)
            raise ConfigError(f"{sections} name different models: give them the same one")
        if not self.deploying("router").initial:
            raise ConfigError("router_config.deployment_config: at least one router is needed")
        credentials.check(self)
        self._check_gangs()

    def _check_gangs(self) -> None:
        if self.worker.gang:
            raise ConfigError(f"worker.gang (value {self.worker.gang!r}): leave it out on Ray")
        changes = self.autoscale.mode in ("roles", "on")
        if changes and any(self.engine_of(role).members > 1 for role in SIDES):
            raise ConfigError(
                "engine.data_parallel_size or engine.nodes is above 1, and gangs on Ray are neither scaled "
                "nor change their roles: leave out autoscale.mode"
            )

    def _check_gpus(self, role: str, engine: EngineSettings) -> None:
        ranks = engine.ranks * engine.data_parallel_size
        gpus = self.bundle(role).get("GPU", ranks / engine.nodes) * engine.nodes
        where = f"{role}_config.placement_group_config"
        if ranks == 1 and gpus < 1:
            if not devices.says_memory(engine):
                raise ConfigError(
                    f"{where}: with {gpus:g} GPUs a worker shares one, and without a size for its KV cache "
                    "it would take nine tenths of it: set engine.kv_cache_gib"
                )
        elif gpus != ranks:
            raise ConfigError(
                f"{where}: {gpus:g} GPUs, but a worker has {ranks} ranks (engine.tensor_parallel_size *"
                " engine.pipeline_parallel_size, * engine.data_parallel_size for a gang): make them equal"
            )


def read(config: str | Path | Mapping[str, Any]) -> ClusterSettings:
    """Load and check cluster.yaml, given as a path or as its content. Raises ConfigError."""
    if isinstance(config, Mapping):
        settings = load(config, None, ClusterSettings)
    else:
        settings = load({}, str(config), ClusterSettings)
    settings.check()
    return settings
