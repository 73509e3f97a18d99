"""Methods that draft from tokens alone: vLLM gives them a seat (its method `custom_class`), we fill it.

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
    """A method whose proposer does all of the drafting. A subclass says who that is, and what it refuses."""

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        """The seat, and how many drafts it may make in a step."""
        return {"method": "custom_class", "model": SEAT, "num_speculative_tokens": spec.limit}

    @abstractmethod
    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer:
        """Who drafts. Made in each rank at start: what takes long (compiling, say) belongs here."""
