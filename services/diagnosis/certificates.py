"""Certificates of this process, of the CA, and of schedulers."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from baton import addresses, rpc
from baton.security.authority import pin_of
from baton.security.errors import SecurityError
from baton.security.identity import CHAIN, KEY, ROOTS, Credentials, load, name_in
from baton.security.names import Role, host_of
from baton.services.config import Settings
from baton.services.diagnosis.finding import About, Finding

AREA = "TLS"
TIMEOUT_S = 3.0
SOON = timedelta(days=30)  # warn of a CA that expires within this: all certificates expire with it
_PART = 8  # a certificate in the last eighth of its life should have been renewed


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield findings on this process's and each scheduler's certificate, or on TLS being off."""
    if not settings.security.tls:
        yield About(AREA, "deployment").ok("off (security.tls): its parts speak plain text to each other")
        return
    folder = rpc.identity_folder()
    if folder is None:
        return  # already reported by the doctor
    try:
        mine = load(folder)
    except SecurityError as error:
        yield About(AREA, "this process").wrong(str(error), "give it a certificate: docs/security.md")
        return
    yield _own(mine)
    yield from _roots(mine)
    for one in settings.scheduler.address.split(","):
        yield _shown(addresses.from_here(one), folder, settings.deployment)


def _own(mine: Credentials) -> Finding:
    what = f"{mine.name.uri}, until {_time(mine.ends)}; issued by the CA beside it"
    if mine.seconds_left() <= 0:
        return About(AREA, "this process").wrong(f"{what}: expired", "join again: docs/security.md")
    return About(AREA, "this process").ok(what)


def _roots(mine: Credentials) -> Iterator[Finding]:
    ca = About(AREA, "CA")
    for root in x509.load_pem_x509_certificates(mine.pems.roots):
        until = _time(root.not_valid_after_utc)
        what = f"until {until}; SHA-256 of its key (the pin of tokens): {pin_of(root)}"
        if root.not_valid_after_utc - datetime.now(UTC) < SOON:
            yield ca.warning(what, "make another CA (`baton ca init`) and let all processes join it")
        else:
            yield ca.ok(what)


def _shown(address: str, folder: Path, topic: str) -> Finding:
    scheduler = About(AREA, f"scheduler at {address}")
    context = ssl.create_default_context(cafile=str(folder / ROOTS))
    context.load_cert_chain(folder / CHAIN, folder / KEY)
    context.set_alpn_protocols(["h2"])
    host, port = addresses.split(address)
    try:
        with (
            socket.create_connection((host, port), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host_of(topic, Role.SCHEDULER)) as secured,
        ):
            shown = x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        cure = "use the same CA (its pin is above), scheduler.topic and security.tls on all processes"
        return scheduler.wrong(f"no handshake: {reason}", cure)
    except (OSError, ValueError) as error:
        return scheduler.warning(f"not reached: {error}", "fix the scheduler first")
    try:
        name = name_in(shown).uri
    except SecurityError as error:
        return scheduler.wrong(str(error), "give it a certificate of Baton's CA")
    end = shown.not_valid_after_utc
    what = f"{name}, until {_time(end)}; of this CA, TLS {secured.version() or ''}"
    if end - datetime.now(UTC) < (end - shown.not_valid_before_utc) / _PART:
        return scheduler.warning(f"{what}: not renewed in time", "see its log, and whether the CA answers")
    return scheduler.ok(what)


def _time(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
