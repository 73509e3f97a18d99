"""Errors of the services."""

import re

from pydantic import ValidationError

from baton.errors import BatonError

# PyYAML also raises these, for example for `!!int x`, 2024-02-30, or lists thousands deep.
NOT_YAML = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ServiceError(BatonError):
    """A service cannot do what was requested."""


class ConfigError(ServiceError):
    """The configuration is invalid. The text names the key, the value and what is allowed."""


class StartError(ServiceError):
    """A service cannot start: port taken, model missing, scheduler unreachable."""


class PeerRefused(ServiceError):
    """Two processes of one deployment are incompatible, for example in vLLM's version or the model."""


def one_line(error: BaseException) -> str:
    """Return the error's text on one line.

    pydantic's own text has several lines and quotes the invalid values, which may be secrets.
    """
    if isinstance(error, ValidationError):
        found = error.errors(include_input=False, include_context=False, include_url=False)
        where = (".".join(map(str, one["loc"])) for one in found)
        said = (re.sub(r"^(Value error|Assertion failed), ", "", one["msg"]) for one in found)
        text = "; ".join(f"{key}: {one}" if key else one for key, one in zip(where, said, strict=True))
    else:
        text = str(error)
    return " ".join(text.split())


def describe(error: BaseException) -> str:
    """Return one line of at most 600 characters, with the error's class unless it is a BatonError."""
    text = one_line(error)[:600]
    if isinstance(error, BatonError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
