"""A logits processor that breaks a step, or slows all steps down, when a request asks for it."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

ENGINE = {"extra": {"logits_processors": [f"{__name__}:Breaking"]}}
ASKING = {"breaking": 1}  # extra_args that ask for an error in the step
SLOW = {"slow": 1}  # extra_args after which every step takes STEP_S longer
STEP_S = 0.05


class Breaking(LogitsProcessor):
    def __init__(self, *_: Any) -> None:
        self._slow = False

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for _, params, *_ in batch_update.added if batch_update else ():
            asked = (params.extra_args or {}).keys()
            if asked & ASKING.keys():
                raise ValueError("a logits processor refuses the request")
            self._slow |= bool(asked & SLOW.keys())
        if self._slow:
            time.sleep(STEP_S)

    def apply(self, logits: Any) -> Any:
        return logits
