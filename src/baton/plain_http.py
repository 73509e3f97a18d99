"""HTTP between Baton's own processes: never through a proxy, whatever the environment names."""

from __future__ import annotations

import os
import urllib.request
from http.client import HTTPResponse
from typing import cast

# Of Python's, gRPC's and other libraries'; each is known in capitals, too.
_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy")

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Ask one of Baton's own processes. Raises what urllib.request.urlopen does."""
    return cast(HTTPResponse, _opener.open(request, timeout=timeout_s))


def proxy_variables() -> list[str]:
    """Return the names of the variables for proxies that are set here; their values may hold passwords."""
    names = [spelled for name in _VARIABLES for spelled in (name, name.upper())]
    return [name for name in names if os.environ.get(name)]
