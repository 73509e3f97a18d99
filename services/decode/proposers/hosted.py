"""Methods that draft from tokens alone, in a seat that vLLM offers: its method `custom_class`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from baton.services.decode.proposers.drafting import Proposer
from baton.services.decode.proposers.method import Method
from baton.services.errors import StartError
from baton.services.speculation import SpeculativeSettings


class Seat:
    """The drafter that vLLM makes for such a method, by the class's dotted name. It drafts nothing itself."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, model: Any) -> None:
        """Load nothing: there is no draft model."""

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """Raise StartError: the patched model runner asks the proposer itself, and never comes here."""
        raise StartError("vLLM did not load Baton's plug-in: name it in VLLM_PLUGINS if that is set")


SEAT = f"{Seat.__module__}.{Seat.__qualname__}"


class TokenMethod(Method):
    """A method whose proposer does all of the drafting. A subclass gives the proposer, and its checks."""

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        """Return the settings of the seat, with the most tokens that it drafts in a step."""
        return {"method": "custom_class", "model": SEAT, "num_speculative_tokens": spec.limit}

    @abstractmethod
    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer:
        """Return the proposer. Called in each rank at start: slow work, as compiling, belongs here."""
