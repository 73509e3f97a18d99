"""The settings of `--speculative-config`, with vLLM's and FastDeploy's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

AUTO = "auto"
MOST = 32
AUTO_MAXIMUM = 5  # the maximum that "auto" may choose if no maximum is set

Positive = Annotated[int, Field(ge=1)]
Strategy = Literal["default", "with_ngram", "with_suffix"]


def _number_or_auto(value: Any) -> Any:
    """Accept a number from 1 to MOST or "auto"; pydantic would report an error for each type."""
    if value == AUTO:
        return value
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if isinstance(value, bool | float) or not 1 <= number <= MOST:
        raise ValueError(f"give a number from 1 to {MOST}, or 'auto'")
    return number


class SpeculativeSettings(BaseModel):
    """Speculative decoding. Method and model must be the same on both sides of a handoff."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    method: str
    """Name of a registered method, e.g. mtp, eagle3, ngram."""
    num_speculative_tokens: Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)] = "auto"
    """Drafted tokens per step; auto chooses them from measured acceptance and cost."""
    max_speculative_tokens: int | None = Field(None, ge=1, le=MOST)
    """Maximum number of drafted tokens that auto may choose; if unset, AUTO_MAXIMUM."""
    model: str | None = None
    """Folder or name of the draft model."""
    num_model_steps: Positive | None = None
    """Number of tokens that the draft model drafts; matching drafts the rest."""
    mtp_strategy: Strategy = "default"
    """Extend drafts of mtp, eagle or eagle3 with n-gram or suffix matches."""
    prompt_lookup_max: Positive | None = None
    """Longest n-gram to look up, in tokens."""
    prompt_lookup_min: Positive | None = None
    """Shortest n-gram to look up, in tokens."""
    suffix_decoding_max_tree_depth: int = Field(24, ge=2)
    """Longest suffix and draft together, in tokens."""
    suffix_decoding_max_cached_requests: int = Field(10_000, ge=0)
    """Number of past outputs kept for matching."""
    suffix_decoding_max_spec_factor: float = Field(1.0, gt=0)
    """Maximum number of drafted tokens per token of matched suffix."""
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1)
    """Minimum estimated probability of a drafted token."""
    quantization: str | None = None
    """Quantization of the draft model's weights, by vLLM's names."""
    draft_tensor_parallel_size: Positive | None = None
    """Tensor-parallel ranks of the draft model."""
    rejection_sample_method: Literal["standard", "block"] = "standard"
    """Verification of drafts at temperature > 0."""
    acceptance_reference: float | None = Field(None, gt=0, le=1)
    """Expected acceptance rate of the first drafted token; learned if unset. A rate well below it raises an
    alarm (docs/observability.md)."""
    verifier: Literal["vllm", "baton"] = "vllm"
    """Kernels that verify drafts. On a CPU, rejection_sample_method block needs baton's."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a method from another package."""

    @model_validator(mode="after")
    def _numbers_agree(self) -> SpeculativeSettings:
        if self.max_speculative_tokens is not None and self.num_speculative_tokens != AUTO:
            raise ValueError(
                "max_speculative_tokens is for num_speculative_tokens 'auto'; leave it out for a number"
            )
        return self

    @property
    def adaptive(self) -> bool:
        """Whether the draft length is chosen step by step."""
        return self.num_speculative_tokens == AUTO

    @property
    def limit(self) -> int:
        """The maximum number of drafted tokens per request and step."""
        if isinstance(self.num_speculative_tokens, int):
            return self.num_speculative_tokens
        return self.max_speculative_tokens or AUTO_MAXIMUM
