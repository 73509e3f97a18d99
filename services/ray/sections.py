"""Sections of cluster.yaml with Ray Serve LLM's keys: the fields of LLMConfig that apply here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

# Keys of autoscaling_config for Ray Serve's autoscaler. Baton scales by its section `slo` instead.
SERVES_OWN = frozenset(
    {
        "aggregation_function",
        "downscale_delay_s",
        "downscale_smoothing_factor",
        "downscale_to_zero_delay_s",
        "downscaling_factor",
        "look_back_period_s",
        "metrics_interval_s",
        "policy",
        "smoothing_factor",
        "target_num_ongoing_requests_per_replica",
        "target_ongoing_requests",
        "upscale_delay_s",
        "upscale_smoothing_factor",
        "upscaling_factor",
    }
)

Amount = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_default(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        return field.get_default(call_default_factory=True) if value is None else value


class ModelLoading(_Section):
    model_id: str = Field("", description="Model name in the API.")
    model_source: str = Field(
        "", description="A folder in Hugging Face's layout, or a name there; model_id if unset."
    )


class Autoscaling(_Section):
    """The minimum and maximum number of workers or routers."""

    min_replicas: int = Field(1, ge=0, description="Fewest.")
    max_replicas: int | None = Field(None, ge=1, description="Most; any number if unset.")
    initial_replicas: int | None = Field(None, ge=0, description="At the start; min_replicas if unset.")
    _unused: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _without_serves_own(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop the keys that only Ray Serve uses, so that its users' files load, and remember their names."""
        if not isinstance(values, Mapping):
            return handler(values)
        one = handler({key: value for key, value in values.items() if key not in SERVES_OWN})
        one._unused = sorted(SERVES_OWN.intersection(values))
        return one

    @model_validator(mode="after")
    def _in_order(self) -> Autoscaling:
        if problem := self.why_not(self.initial):
            raise ValueError(f"{problem} (initial_replicas)")
        return self

    @property
    def initial(self) -> int:
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    @property
    def bounds(self) -> dict[str, int]:
        """The given limits, as `min` and `max`."""
        given = {"min": self.min_replicas, "max": self.max_replicas}
        return {
            end: number
            for end, number in given.items()
            if number is not None and f"{end}_replicas" in self.model_fields_set
        }

    @property
    def unused(self) -> list[str]:
        """The given keys that only Ray Serve uses."""
        return self._unused

    def why_not(self, number: int) -> str:
        """Return why this number is not allowed, or ""."""
        if number < self.min_replicas:
            return f"{number} is less than min_replicas ({self.min_replicas})"
        if self.max_replicas is not None and number > self.max_replicas:
            return f"{number} is more than max_replicas ({self.max_replicas})"
        return ""


class Deploying(_Section):
    num_replicas: int | None = Field(None, ge=0, description="A fixed number; 1 if unset.")
    autoscaling_config: Autoscaling | None = Field(None, description="Bounds for changes of the number.")

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


class Placing(_Section):
    """The resources of one worker or gang: bundles are added up, and divided among its nodes."""

    bundles: list[dict[str, Amount]] = Field(default_factory=list, description="Resources by Ray's names.")
    bundle_per_worker: dict[str, Amount] = Field(
        default_factory=dict, description="Resources of each rank, instead of bundles."
    )
    strategy: Literal["PACK", "STRICT_PACK"] = Field(
        "STRICT_PACK", description="With either, a worker's ranks share a node."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Placing:
        if self.bundles and self.bundle_per_worker:
            raise ValueError("bundles and bundle_per_worker exclude each other: leave one out")
        return self


class Workers(_Section):
    model_loading_config: ModelLoading = Field(default_factory=ModelLoading)
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Engine arguments, which override the section `engine`."
    )
    accelerator_type: str = Field("", description="The nodes' accelerator, by Ray's name, e.g. H100.")
    label_selector: dict[str, str] = Field(default_factory=dict, description="Labels that nodes must have.")
    placement_group_config: Placing = Field(default_factory=Placing)
    deployment_config: Deploying = Field(default_factory=Deploying)
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="Ray's runtime environment of the workers."
    )


class Routers(_Section):
    """The routers: at most one per node, the first on the node that started the deployment."""

    deployment_config: Deploying = Field(default_factory=Deploying)
