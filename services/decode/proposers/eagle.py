"""Draft with EAGLE (Li et al., 2024): one layer on the target's last hidden states."""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.checkpoint import draft_config
from baton.services.decode.proposers.wrapped import Continued
from baton.services.speculation import SpeculativeSettings


class Eagle(Continued):
    name: ClassVar[str] = "eagle"

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        del model
        draft_config(spec, "an EAGLE head")
