"""Check the ports of parts before a deployment starts, and wait for them when a part is restarted."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time

from baton import addresses
from baton.services.errors import ConfigError, StartError

WAIT_S = 60.0  # an outgoing connection may have taken the port of a part that died
LOOK_S = 0.5

log = logging.getLogger(__name__)


def check_port(key: str, host: str, port: int) -> None:
    """Check that a part can listen on a port. `key`: the setting that names the port.

    Raises ConfigError for port 0, and StartError if the port is taken or the host is not this machine's.
    """
    if port == 0:
        raise ConfigError(f"{key}: port 0 is not allowed here: other parts must know the port; choose one")
    try:
        with addresses.listen(host, port):
            return
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            where = key.replace("router.port", "router.host")
            raise StartError(f"{where}: cannot listen on {host}: this machine has no such address") from None
        # The error's own text repeats the address as a tuple.
        raise StartError(
            f"{key}: cannot listen on {addresses.join(host, port)}: {os.strerror(error.errno or 0)}; "
            "choose another port or stop the process that uses it"
        ) from None


def reserved(host: str) -> socket.socket:
    """Return a socket that reserves a free port: it is bound, but does not listen.

    A process that names the port can listen on it (both set SO_REUSEADDR), but the kernel never gives it to
    one that asks for any port.
    """
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((host, 0))
    return one


def await_free(host: str, port: int, within_s: float = WAIT_S) -> None:
    """Wait at most this long while another process holds a part's port; after that, the part reports it."""
    deadline = time.monotonic() + within_s
    told = False
    while port and _taken(host, port) and time.monotonic() < deadline:
        if not told:
            told = True
            where = addresses.join(host, port)
            log.warning("%s is taken; waiting for it, %.0f s at most", where, within_s)
        time.sleep(LOOK_S)


def _taken(host: str, port: int) -> bool:
    try:
        addresses.listen(host, port).close()
    except OSError as error:  # another error, such as a foreign address, is reported by the part
        return error.errno == errno.EADDRINUSE
    return False
