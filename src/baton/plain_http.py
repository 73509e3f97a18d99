"""HTTP between Baton's own processes, never through a proxy."""

from __future__ import annotations

import os
import urllib.request
from http.client import HTTPResponse
from typing import cast

# Variables of Python, gRPC and other libraries; each also works in capitals.
_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy")

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Send a GET to one of Baton's own processes. Raises the errors of urllib.request.urlopen."""
    return cast(HTTPResponse, _opener.open(request, timeout=timeout_s))


def proxy_variables() -> list[str]:
    """Return the names of the proxy variables that are set, without values, which may hold passwords."""
    names = [spelled for name in _VARIABLES for spelled in (name, name.upper())]
    return [name for name in names if os.environ.get(name)]
