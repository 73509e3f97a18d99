"""The ports of parts, checked before they start: one that is taken is told at once, not by a death."""

from __future__ import annotations

import errno
import os
import socket

from baton import addresses
from baton.services.errors import ConfigError, StartError


def check_port(key: str, host: str, port: int) -> None:
    """Check that a part can listen there. key: of the setting that names the port.

    Raises ConfigError for port 0, and StartError where the port is taken or the host is not this machine's.
    """
    if port == 0:
        raise ConfigError(f"{key}: port 0 is not allowed here, as other parts must know the port; choose one")
    try:
        with addresses.listen(host, port):
            return
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            where = key.replace("router.port", "router.host")
            raise StartError(f"{where}: cannot listen on {host}: this machine has no such address") from None
        # The error's own text would repeat the address as a tuple.
        raise StartError(
            f"{key}: cannot listen on {addresses.join(host, port)}: {os.strerror(error.errno or 0)}; "
            "choose another port or stop the process that uses it"
        ) from None
