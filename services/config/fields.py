"""The base class of configuration sections, and the types of their fields."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    ValidationInfo,
    field_validator,
)

from baton import addresses
from baton.redis_url import has_password, password_file

OFF = ("none", "null", "")  # texts that turn an optional section off
REVEAL = {"secrets": True}  # pydantic context for a dump with secrets, for another process of Baton
# (section, key) of values that are never shown in errors or process titles.
SECRET = {
    ("router", "api_key"),
    ("router", "keys_store"),
    ("scheduler", "store"),
    ("engine", "extra"),
    ("fleet", "engines"),
    ("security", "token"),
    ("ops", "key"),
}


def leaves(kind: Any) -> set[Any]:
    """Return the types in a union or `Annotated`, without None; a list or dict is one type."""
    origin = get_origin(kind)
    if origin in (list, dict, Literal):
        return {origin}
    if origin is Annotated:
        return leaves(get_args(kind)[0])
    inner = [one for one in get_args(kind) if one is not type(None)]
    return {leaf for one in inner for leaf in leaves(one)} if inner else {kind}


class Section(BaseModel):
    """A section of the configuration. The docstring of a key is its text in --help and in the docs."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `port: yes`, which YAML and pydantic would turn into 1."""
        name = info.field_name or ""
        if isinstance(value, bool) and {int, float} & leaves(cls.model_fields[name].annotation):
            raise ValueError("a number is expected")
        return value

    def refuse_both(self, one: str, other: str) -> None:
        """Raise ValueError if both keys have a value."""
        if getattr(self, one) and getattr(self, other):
            raise ValueError(f"{one} and {other} exclude each other: leave one out")


def one_password(url: str) -> str:
    """Return the URL. Raises ValueError if it has a password and names a file with one."""
    if has_password(url) and password_file(url):
        raise ValueError("a password and a password_file exclude each other: leave one out")
    return url


def _address(value: str) -> str:
    for one in value.split(",") if value else []:
        try:
            addresses.split(one)
        except ValueError:
            port = ""
        else:
            port = one.strip().rpartition(":")[2]
        if not port.isdecimal():
            raise ValueError("give host:port, with a port up to 65535")
    return value


def _transport(value: str) -> str:
    # Imported here, because it doubles the import time of the configuration.
    from baton.handoff.errors import HandoffError
    from baton.handoff.transports import REGISTRY

    try:
        REGISTRY.check([value])
    except HandoffError as error:
        raise ValueError(str(error)) from None
    return value


def _gpu(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):  # an index in YAML
        value = str(value)
    if not isinstance(value, str) or not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", value):
        raise ValueError("give GPUs as CUDA_VISIBLE_DEVICES does: by index, or as GPU-... or MIG-...")
    return value


def _range(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):  # a fixed number in YAML
        value = str(value)
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", value) if isinstance(value, str) else None
    if not found:
        raise ValueError("give a minimum and a maximum, such as 1-4")
    least, most = int(found[1]), int(found[2] or found[1])
    if least > most:
        raise ValueError(f"the minimum ({least}) is above the maximum ({most})")
    return f"{least}-{most}"


def _masked(secret: SecretStr, info: SerializationInfo) -> str:
    return secret.get_secret_value() if info.context == REVEAL else str(secret)


Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Range = Annotated[str, BeforeValidator(_range)]  # MIN-MAX
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Address = Annotated[str, AfterValidator(_address)]  # host:port, or several separated by commas
TransportName = Annotated[str, AfterValidator(_transport)]  # Baton's or an installed package's
GpuName = Annotated[str, BeforeValidator(_gpu)]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]
Secret = Annotated[SecretStr, PlainSerializer(_masked, when_used="json-unless-none")]
