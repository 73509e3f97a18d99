"""Check speculative settings before anything is loaded."""

from __future__ import annotations

from baton.services.config import EngineSettings
from baton.services.decode.proposers import registry
from baton.services.decode.proposers.checkpoint import config_of
from baton.services.decode.proposers.method import MATCHING, SUFFIXES, Method, refuse
from baton.services.speculation import SpeculativeSettings

_ALWAYS = frozenset(
    {"method", "num_speculative_tokens", "max_speculative_tokens", "rejection_sample_method", "verifier"}
    | {"acceptance_reference"}
)
_BELONGS = {
    **dict.fromkeys(MATCHING, "it goes with ngram, or with mtp_strategy 'with_ngram'"),
    **dict.fromkeys(SUFFIXES, "it goes with suffix, or with mtp_strategy 'with_suffix'"),
    "model": "it goes with a method that has a draft model: eagle, eagle3, draft_model, medusa, mtp",
    "quantization": "it goes with a method that has a draft model",
    "draft_tensor_parallel_size": "it goes with eagle, eagle3, draft_model and mtp",
    "mtp_strategy": "it goes with mtp, eagle and eagle3",
    "num_model_steps": "it goes with mtp_strategy 'with_ngram' or 'with_suffix' of mtp, eagle and eagle3",
    "parameters": "it is for methods of other packages",
}


def check(engine: EngineSettings) -> Method | None:
    """Check the settings and return their method, if any. Raises ConfigError, which says what would work."""
    spec = engine.speculative_config
    if spec is None:
        return None
    method = registry.method(spec.method)
    meant = method.keys(spec) | _ALWAYS
    for key, field in type(spec).model_fields.items():
        if key not in meant and getattr(spec, key) != field.get_default(call_default_factory=True):
            raise refuse(key, spec, f"method {spec.method!r} does not use it here; {_BELONGS[key]}")
    _check_numbers(spec, method)
    _check_ranks(engine, spec)
    if engine.data_parallel_size > 1:
        _check_gang(spec)
    method.check(spec, config_of(engine.model))
    return method


def _check_numbers(spec: SpeculativeSettings, method: Method) -> None:
    if spec.adaptive and method.fixed_length:
        raise refuse(
            "num_speculative_tokens",
            spec,
            f"method {spec.method!r} drafts the same number in each step: set it",
        )
    if spec.num_model_steps is not None and spec.num_model_steps > spec.limit:
        raise refuse("num_model_steps", spec, f"it cannot be above the {spec.limit} drafted tokens per step")
    shortest, longest = spec.prompt_lookup_min, spec.prompt_lookup_max
    if shortest is not None and longest is not None and shortest > longest:
        raise refuse("prompt_lookup_min", spec, f"it cannot be above prompt_lookup_max, which is {longest}")


def _check_ranks(engine: EngineSettings, spec: SpeculativeSettings) -> None:
    ranks, drafters = engine.tensor_parallel_size, spec.draft_tensor_parallel_size
    if drafters is None or drafters == ranks:
        return
    if spec.method == "draft_model" or drafters != 1:
        allowed = f"{ranks}" if spec.method == "draft_model" else f"1 or {ranks}"
        raise refuse(
            "draft_tensor_parallel_size",
            spec,
            f"engine.tensor_parallel_size is {ranks}: set it to {allowed}, or leave it out",
        )


def _check_gang(spec: SpeculativeSettings) -> None:
    """Refuse settings with which engines of a gang could run their drafters different numbers of times."""
    if spec.adaptive:
        raise refuse(
            "num_speculative_tokens",
            spec,
            "the engines of a gang (engine.data_parallel_size) must draft the same number: set it",
        )
    if spec.mtp_strategy != "default":
        raise refuse(
            "mtp_strategy",
            spec,
            "the engines of a gang (engine.data_parallel_size) must all run their drafters: leave it out",
        )
