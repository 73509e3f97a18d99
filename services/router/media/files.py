"""Get image files: from `data:` URLs, or from the domains in `router.media.allowed_domains`.

A fetch resolves a name once, refuses it if any of its addresses is not public, and connects to one of those.
Redirects are not followed. An IP address in a URL must itself be in the list, public or not.
"""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import socket
from collections.abc import Collection

import aiohttp
import pybase64
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from baton.services.router.errors import Unsupported

FETCH_S = 10.0  # for one file
_KINDS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WebP", "gif": "GIF"}
_UNKNOWN = ("", "application/octet-stream")
_SHOWN = 60  # characters of a URL in an error
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PORTS = {"http": 80, "https": 443}


def read_data_url(url: str) -> tuple[bytes, str]:
    """Return a `data:` URL's content and the format that it declares, or "". Raises Unsupported."""
    comma = url.find(",", 0, 200)
    head = url[5 : max(5, comma)].lower()
    declared, *parameters = (part.strip() for part in head.split(";"))
    if comma < 0 or "base64" not in parameters[-1:]:
        raise Unsupported("a data: URL must be data:image/FORMAT;base64,DATA")
    if declared not in _UNKNOWN and not declared.startswith("image/"):
        raise Unsupported(f"it is declared as {declared[:_SHOWN]!r}, which is no image")
    try:
        file = pybase64.b64decode(url[comma + 1 :], validate=True)  # 12 times as fast as binascii
    except (binascii.Error, ValueError) as error:
        raise Unsupported(f"its data are not base64: {str(error)[:100]}") from None
    return file, _KINDS.get(declared.removeprefix("image/"), "")


def check_url(url: str, allowed: Collection[str]) -> URL | None:
    """Return a URL that may be fetched; None for a `data:` URL. Raises Unsupported for all others."""
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        return None
    shown = url[:_SHOWN]
    if scheme not in _PORTS:
        raise Unsupported(f"{shown!r} is neither a data: nor an http(s) URL")
    if not allowed:
        raise Unsupported(
            "images are not fetched here: send the file as a data: URL (router.media.allowed_domains)"
        )
    try:
        parsed = URL(url)
        host, port = (parsed.host or "").rstrip(".").lower(), parsed.port
    except ValueError as error:
        raise Unsupported(f"{shown!r} is not a valid URL: {error}") from None
    if parsed.user is not None or parsed.password is not None:
        raise Unsupported("a URL with a user or a password is not fetched")
    named = f"[{host}]" if ":" in host else host
    if f"{named}:{port}" not in allowed and not (named in allowed and port == _PORTS[scheme]):
        raise Unsupported(
            f"images are not fetched from {f'{named}:{port}'[:_SHOWN]!r} (router.media.allowed_domains)"
        )
    return parsed.with_fragment(None)


def is_public(address: str) -> bool:
    """Return whether an address, perhaps embedded in an IPv6 address, is public and belongs to one host."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.teredo is not None or found.is_site_local:
            return False
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast and not found.is_reserved


class _NotPublic(OSError):
    pass


class PublicResolver(AbstractResolver):
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a name. Raises OSError if one of them is not public."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        addresses = [(str(address[0]), kind, proto) for kind, _, proto, _, address in found]
        for address, *_ in addresses:
            if not is_public(address):
                raise _NotPublic
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address, kind, proto in addresses
        ]

    async def close(self) -> None:
        """Nothing to close."""


class Fetcher:
    """Fetches files with one session, inside `async with`."""

    def __init__(self, most_bytes: int, fetch_s: float = FETCH_S) -> None:
        self._most = most_bytes
        self._timeout = aiohttp.ClientTimeout(total=fetch_s)

    async def __aenter__(self) -> Fetcher:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=PublicResolver(), use_dns_cache=False),
            timeout=self._timeout,
            headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "baton"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def fetch(self, url: URL) -> bytes:
        """Return a file of at most `most_bytes`. Raises Unsupported."""
        host = str(url.host)[:_SHOWN]
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if 300 <= response.status < 400:
                    raise Unsupported(f"{host} redirects to another URL: give that one")
                if response.status != 200:
                    raise Unsupported(f"{host} answers with status {response.status}")
                return await self._body(response, host)
        except TimeoutError:
            raise Unsupported(f"{host} does not send the file within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unsupported(f"it cannot be fetched from {host}: {_reason(error)}") from None

    async def _body(self, response: aiohttp.ClientResponse, host: str) -> bytes:
        parts, size = [], response.content_length or 0
        if size <= self._most:
            size = 0
            async for part in response.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > self._most:
                    break
        if size > self._most:
            raise Unsupported(
                f"the file at {host} is larger than {self._most >> 20} MiB (router.max_body_mib)"
            )
        return b"".join(parts)


def _reason(error: Exception) -> str:
    """Return what went wrong, without addresses: a client should not learn how names resolve here."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return (
            "its address is not public" if isinstance(error.os_error, _NotPublic) else "its name is not known"
        )
    return type(error).__name__
