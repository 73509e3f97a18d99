"""A logits processor that raises an error when a request that asks for one joins the batch."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

ENGINE = {"extra": {"logits_processors": [f"{__name__}:Breaking"]}}
ASKING = {"breaking": 1}  # extra_args that ask for the error


class Breaking(LogitsProcessor):
    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for _, params, *_ in batch_update.added if batch_update else ():
            if (params.extra_args or {}).keys() & ASKING.keys():
                raise ValueError("a logits processor refuses the request")

    def apply(self, logits: Any) -> Any:
        return logits
