"""Define the settings of `--lora`: adapters by name, and how much room they have.

The router and every worker share them; services/engine/adapters.py reads the folders.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]


class LoraSettings(BaseModel):
    """The LoRA adapters of a deployment: the same on both sides of a handoff, and in the routers."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    adapters: dict[Name, str] = Field(min_length=1)
    """Folders in PEFT's layout, by the name that clients ask for."""
    max_lora_rank: int | None = Field(None, ge=1, le=512)
    """Highest rank of an adapter; if unset that of the adapters here."""
    max_loras: int | None = Field(None, ge=1)
    """Most adapters in one batch, each with room of its own on the device; if unset all, but at most 8."""
