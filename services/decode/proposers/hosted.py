"""Methods that draft from tokens alone, in a seat that vLLM offers: its method `custom_class`.

The seat itself is in services/engine/patches/drafts_v1.py.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from baton.services.decode.proposers.drafting import Proposer
from baton.services.decode.proposers.method import Method
from baton.services.speculation import SpeculativeSettings

SEAT = "baton.services.engine.patches.drafts_v1.Seat"


class TokenMethod(Method):
    """A method whose proposer does all of the drafting. A subclass gives the proposer, and its checks."""

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        """Return the settings of the seat, with the most tokens that it drafts in a step."""
        return {"method": "custom_class", "model": SEAT, "num_speculative_tokens": spec.limit}

    @abstractmethod
    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer:
        """Return the proposer. Called in each rank at start: slow work, as compiling, belongs here."""
