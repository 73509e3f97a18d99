"""The base of methods that draft from tokens alone: they run as vLLM's method `custom_class`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from baton.services.decode.proposers.drafting import Proposer
from baton.services.decode.proposers.method import Method
from baton.services.errors import StartError
from baton.services.speculation import SpeculativeSettings


class Seat:
    """The drafter that vLLM creates for such a method, from a dotted class name. It drafts nothing itself."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, model: Any) -> None:
        """Load nothing: there is no draft model."""

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """Raise StartError: only an unpatched model runner calls this, instead of the proposer."""
        raise StartError("vLLM did not load Baton's plug-in: if VLLM_PLUGINS is set, add it there")


SEAT = f"{Seat.__module__}.{Seat.__qualname__}"


class TokenMethod(Method):
    """A method whose proposer does all the drafting."""

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        return {"method": "custom_class", "model": SEAT, "num_speculative_tokens": spec.limit}

    @abstractmethod
    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer:
        """Return the proposer. Called in each rank at start: do slow work, such as compiling, here."""
