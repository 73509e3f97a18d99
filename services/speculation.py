"""`--speculative-config`: which method drafts, how much, and what it needs; in vLLM's and FastDeploy's terms.

The router, every worker and the command line read the same settings; only a worker turns them into what
vLLM takes (services/decode/proposers).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

AUTO = "auto"
MOST = 32
AUTO_MAXIMUM = 5  # drafted tokens a step that "auto" may reach where no maximum is set

Strategy = Literal["default", "with_ngram", "with_suffix"]


def _number_or_auto(value: Any) -> Any:
    """One message instead of one for each type."""
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
    """How a deployment drafts. Shapes of state (method, model) must agree on both sides of a handoff."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    method: str = Field(description="Name of a registered method, e.g. mtp, eagle3, ngram.")
    num_speculative_tokens: Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)] = Field(
        "auto", description="Drafted tokens a step, or auto: chosen each step from what was measured."
    )
    max_speculative_tokens: int | None = Field(
        None, ge=1, le=MOST, description=f"The most that auto may choose; {AUTO_MAXIMUM} if unset."
    )
    model: str | None = Field(None, description="Folder or name of the draft model, if the method has one.")
    num_model_steps: int | None = Field(
        None,
        ge=1,
        description="Of the drafted tokens, those of the draft model; the rest is matched.",
    )
    mtp_strategy: Strategy = Field(
        "default",
        description="Continue the drafts of mtp, eagle or eagle3 by n-gram or suffix matches.",
    )
    prompt_lookup_max: int | None = Field(None, ge=1, description="Longest n-gram that is looked for.")
    prompt_lookup_min: int | None = Field(None, ge=1, description="Shortest one.")
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, description="Longest suffix and draft together.")
    suffix_decoding_max_cached_requests: int = Field(10_000, ge=0, description="Past answers kept.")
    suffix_decoding_max_spec_factor: float = Field(1.0, gt=0, description="Drafts a token of matched suffix.")
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0, le=1, description="A token is drafted if it followed at least this often."
    )
    quantization: str | None = Field(None, description="Of the draft model's weights; vLLM's names.")
    draft_tensor_parallel_size: int | None = Field(None, ge=1, description="Ranks of the draft model.")
    rejection_sample_method: Literal["standard", "block"] = Field(
        "standard", description="How drafts are verified at temperature > 0."
    )
    verifier: Literal["vllm", "baton"] = Field(
        "vllm", description="Whose kernels verify drafts; on CPU, block needs baton's."
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="For a method from another package: what it wants to know."
    )

    @model_validator(mode="after")
    def _numbers_agree(self) -> SpeculativeSettings:
        if self.max_speculative_tokens is not None and self.num_speculative_tokens != AUTO:
            raise ValueError(
                "max_speculative_tokens goes with num_speculative_tokens 'auto'; leave it out for a number"
            )
        return self

    @property
    def adaptive(self) -> bool:
        """The number of drafted tokens is chosen step by step."""
        return self.num_speculative_tokens == AUTO

    @property
    def limit(self) -> int:
        """Most drafted tokens of a request in one step: what buffers and look-ahead are made for."""
        if isinstance(self.num_speculative_tokens, int):
            return self.num_speculative_tokens
        return self.max_speculative_tokens or AUTO_MAXIMUM
