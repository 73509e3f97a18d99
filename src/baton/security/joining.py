"""Get a certificate from the CA: the first one with a token, later ones with the previous certificate.

A joiner compares the CA's key with the token's pin. Neither its own key nor the token's secret is sent. (As
in kubeadm, with an HMAC in place of a bearer token.)
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton import addresses
from baton.security.authority import Token, new_key, pin_of, request_for
from baton.security.errors import CAUnreachable, JoinRefused
from baton.security.identity import Credentials, Pems, checked
from baton.security.names import Name, Role, host_of

TIMEOUT_S = 10.0  # limit for each request to the CA
RETRY_S = 0.5
MAX_BYTES = 64 << 10  # limit on the size of an answer


def join(address: str, token: Token, name: Name, wait_s: float = 0.0) -> Pems:
    """Return a new key and its certificate from the CA at `address`. Raises JoinRefused.

    A CA that does not answer may be starting, and is asked again for `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            roots = _roots(address, token)
            break
        except CAUnreachable:
            if time.monotonic() + RETRY_S > deadline:
                raise
            time.sleep(RETRY_S)
    key = new_key()
    request = request_for(key)
    asked = {
        "token": token.id,
        "name": name.uri,
        "request": request.decode(),
        "mac": token.mac(name, request),
    }
    return _received(address, "/join", asked, key=key, roots=roots, name=name)


def renew(address: str, last: Credentials) -> Pems:
    """Return a new key and its certificate, in place of ones that have not expired. Raises JoinRefused."""
    key = new_key()
    request = request_for(key)
    old = serialization.load_pem_private_key(last.pems.key, None)
    if not isinstance(old, ec.EllipticCurvePrivateKey):
        raise JoinRefused("the last certificate's key is not an ECDSA key")
    asked = {
        "certificate": last.pems.chain.decode(),
        "request": request.decode(),
        "signature": old.sign(request, ec.ECDSA(hashes.SHA256())).hex(),
    }
    return _received(address, "/renew", asked, key=key, roots=last.pems.roots, name=last.name)


def _roots(address: str, token: Token) -> bytes:
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE  # the pin is checked instead
    pem = _exchange(address, "/ca", unverified)
    try:
        found = pin_of(x509.load_pem_x509_certificate(pem))
    except ValueError as error:
        raise JoinRefused(f"{address} sent something other than a CA's certificate: {error}") from None
    if found != token.pin:
        raise JoinRefused(f"the CA at {address} did not issue the token: its key has SHA-256 {found}")
    return pem


def _received(
    address: str,
    path: str,
    asked: dict[str, str],
    *,
    key: ec.EllipticCurvePrivateKey,
    roots: bytes,
    name: Name,
) -> Pems:
    verified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    verified.minimum_version = ssl.TLSVersion.TLSv1_3
    verified.load_verify_locations(cadata=roots.decode())
    body = json.dumps(asked).encode()
    chain = _exchange(address, path, verified, host_of(name.topic, Role.CA), body)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pems = Pems(private, chain, roots)
    if checked(pems, f"the answer of {address}").name != name:
        raise JoinRefused(f"the CA at {address} sent a certificate whose name is not {name.uri}")
    return pems


def _exchange(
    address: str, path: str, context: ssl.SSLContext, server: str | None = None, body: bytes = b""
) -> bytes:
    host, port = addresses.split(address)
    try:
        with (
            socket.create_connection((host, port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=server) as sock,
        ):
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
            connection.sock = sock
            connection.request("POST" if body else "GET", path, body or None)
            answer = connection.getresponse()
            text: Any = answer.read(MAX_BYTES)
    except ssl.SSLError as error:
        raise JoinRefused(f"the CA at {address} cannot be trusted: {error.reason or error}") from None
    except (OSError, http.client.HTTPException) as error:
        raise CAUnreachable(
            f"the CA at {address} does not answer ({error}): is it up, is the address right?"
        ) from None
    if answer.status != http.client.OK:
        line = " ".join(text.decode(errors="replace").split())[:500]
        raise JoinRefused(f"the CA at {address} refuses: {line}")
    return bytes(text)
