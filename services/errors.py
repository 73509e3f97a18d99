"""What goes wrong in a service.

BatonError
└── ServiceError
    ├── ConfigError      the configuration is wrong: said before anything starts
    ├── StartError       a service cannot start: port taken, model missing, scheduler away
    └── PeerRefused      two processes may not talk: another vLLM version, another model
"""

from pydantic import ValidationError

from baton.errors import BatonError


class ServiceError(BatonError):
    """A service cannot do what it was asked to."""


class ConfigError(ServiceError):
    """A key is unknown or its value is not allowed; names the key, the value and what is."""


class StartError(ServiceError):
    """A service cannot start. The command ends with this line and a status that is not 0."""


class PeerRefused(ServiceError):
    """Two processes of one deployment do not fit together."""


def one_line(error: BaseException) -> str:
    """What it says, in one line. pydantic's would quote the values that it was given, secrets among them."""
    if isinstance(error, ValidationError):
        found = error.errors(include_input=False, include_context=False, include_url=False)
        where = (".".join(map(str, one["loc"])) for one in found)
        return "; ".join(
            f"{key}: {one['msg']}" if key else one["msg"] for key, one in zip(where, found, strict=True)
        )
    return " ".join(str(error).split())
