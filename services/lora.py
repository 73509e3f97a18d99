"""Define the settings of `--lora`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]


class LoraSettings(BaseModel):
    """LoRA adapters. They must be the same on workers and routers."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    adapters: dict[Name, str] = Field(min_length=1)
    """Folders in PEFT's layout, by model name in the API."""
    max_loras: int | None = Field(None, ge=1)
    """Maximum number of adapters in one batch, each of which takes device memory; by default all, but at most
    8."""
