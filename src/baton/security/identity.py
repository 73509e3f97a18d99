"""A process's key and certificate: three files in a folder, read again when they change.

The files have the names of a Kubernetes TLS secret, so an issuer other than Baton's CA can renew them.
Several processes, such as the ranks of a worker, may read a folder; only one writes to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from baton.security.errors import AuthorityError, IdentityError
from baton.security.names import Name

KEY, CHAIN, ROOTS = "tls.key", "tls.crt", "ca.crt"

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pems:
    key: bytes
    chain: bytes  # the certificate and intermediate ones
    roots: bytes  # the CA's certificates


@dataclass(frozen=True)
class Credentials:
    """A key and a certificate that belong together."""

    pems: Pems
    name: Name
    begins: datetime
    ends: datetime

    @property
    def half_life(self) -> datetime:
        return self.begins + (self.ends - self.begins) / 2

    def seconds_left(self) -> float:
        """Return how long the certificate is valid; negative if it has expired."""
        return (self.ends - datetime.now(UTC)) / timedelta(seconds=1)


class Identity:
    """The current credentials in a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read the folder. Raises IdentityError."""
        self.folder = folder
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self._credentials = load(folder)

    @property
    def name(self) -> Name:
        """The name in the certificate, which never changes."""
        return self._credentials.name

    def current(self) -> Credentials:
        """Return the credentials: the same object until the files change. Costs a stat.

        Files that do not belong together are ignored, for example while they are being replaced.
        """
        with self._lock:
            try:
                stamp = self._stamp_now()
                if stamp != self._stamp:
                    found = load(self.folder)
                    if found.name != self.name:
                        raise IdentityError(f"{self.folder} is {found.name.uri} now; it was {self.name.uri}")
                    self._credentials, self._stamp = found, stamp
            except IdentityError as error:
                logger.warning("the last certificate stays in use: %s", error)
            return self._credentials

    def _stamp_now(self) -> tuple[int, int]:
        try:
            found = (self.folder / CHAIN).stat()
        except OSError as error:
            raise IdentityError(f"no certificate in {self.folder}: {error.strerror}") from None
        return found.st_mtime_ns, found.st_ino


def load(folder: Path) -> Credentials:
    """Read and check the files in a folder. Raises IdentityError."""
    try:
        pems = Pems(*((folder / name).read_bytes() for name in (KEY, CHAIN, ROOTS)))
    except OSError as error:
        raise IdentityError(f"cannot read {error.filename}: {error.strerror}") from None
    return checked(pems, str(folder))


def checked(pems: Pems, where: str) -> Credentials:
    """Check the files and return their credentials. Raises IdentityError, which names `where`."""
    try:
        certificate, *between = x509.load_pem_x509_certificates(pems.chain)
        key = serialization.load_pem_private_key(pems.key, None)
        roots = x509.load_pem_x509_certificates(pems.roots)
    except (ValueError, TypeError) as error:
        raise IdentityError(f"{where} contains something other than PEM: {error}") from None
    if key.public_key() != certificate.public_key():
        raise IdentityError(f"the key in {where} does not belong to the certificate there")
    if not any(_issued(certificate, one) for one in (*between, *roots)):
        raise IdentityError(f"the certificate in {where} is not from the CA there")
    return Credentials(
        pems, name_in(certificate), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    )


def name_in(certificate: x509.Certificate) -> Name:
    """Return the name in a certificate. Raises IdentityError."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise IdentityError("a certificate without a SPIFFE id") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise IdentityError(f"a certificate with {len(uris)} SPIFFE ids; one is needed")
    return Name.parse(uris[0])


def write(folder: Path, pems: Pems) -> None:
    """Replace the files in a folder; only this user can read them. Raises IdentityError.

    The certificate is written last, so a process that finds a new certificate also finds its key.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in ((ROOTS, pems.roots), (KEY, pems.key), (CHAIN, pems.chain)):
            replace(folder / name, text)
    except OSError as error:
        raise IdentityError(f"cannot write {error.filename}: {error.strerror}") from None


def replace(path: Path, text: bytes) -> None:
    """Write a file atomically, readable only by this user. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other processes, by means of a second file. Raises OSError."""
    with open(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def kept_json(path: Path, what: str, parse: Callable[[Any], T]) -> Iterator[dict[str, T]]:
    """Yield a file's JSON object, with parsed values, under a lock, and save changes unless the block raises.

    Raises AuthorityError.
    """
    try:
        with locked(path):
            try:
                before = path.read_bytes()
            except FileNotFoundError:
                before = b"{}"
            try:
                found = {key: parse(value) for key, value in json.loads(before).items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise AuthorityError(f"the CA's {what} in {path} cannot be read: {error}") from None
            was = json.dumps(found, indent=1, default=asdict)
            yield found
            if (text := json.dumps(found, indent=1, default=asdict)) != was:
                replace(path, text.encode())
    except OSError as error:
        raise AuthorityError(f"the CA's {what} in {path}: {error.strerror}") from None


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
