"""The CA: an ECDSA key in a folder, which signs the short-lived certificates of a deployment.

A certificate serves both ends of a connection. It expires soon, because revocations take effect only at
renewals. So that a certificate is revoked together with its renewals, its subject names its line: the serial
number of the first certificate in the chain of renewals. The CA takes only the public key from a joiner's
request.

Tokens for joining are `ID.SECRET.PIN` in one line of text (as in kubeadm). The joiner authenticates its
request with an HMAC, so the secret is never sent. The pin is the SHA-256 of the CA's public key. Tokens and
revocations are in files that `baton ca token`, `baton ca revoke` and `baton ca serve` share. Revoking a name
affects certificates issued so far, not later joins.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.security.errors import AuthorityError, IdentityError, JoinRefused, TokenError
from baton.security.identity import Pems, kept_json, name_in, replace
from baton.security.names import Name, Role

KEPT_S = 7 * 86_400  # how long expired tokens are kept
_ID = re.compile(r"[0-9a-f]{12}")
_TEXT = re.compile(r"([0-9a-f]{12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


@dataclass(frozen=True)
class Token:
    """A token as its joiner gets it."""

    id: str
    secret: str
    pin: str

    @classmethod
    def parse(cls, text: str) -> Token:
        """Parse a token. Raises TokenError, without the text."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise TokenError("not a token: it is ID.SECRET.PIN in one line, as `baton ca token` prints it")
        return cls(*found.groups())

    def mac(self, name: Name, request: bytes) -> str:
        """Return the HMAC of a request, in hex."""
        return _mac(self.id, self.secret, name, request)

    def __str__(self) -> str:
        return f"{self.id}.{self.secret}.{self.pin}"


@dataclass
class Grant:
    """The CA's record of a token."""

    secret: str
    role: str
    topic: str
    expires_at: float  # wall clock, seconds
    uses: int | None  # left; None: any number
    life_s: float  # lifetime of the certificates


class TokenStore:
    """The CA's tokens, in a file that `baton ca token` and `baton ca serve` share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(
        self, role: Role, topic: str, *, valid_s: float, uses: int | None, life_s: float, pin: str
    ) -> Token:
        """Create a token for processes with this role and topic. Raises AuthorityError."""
        token = Token(secrets.token_hex(6), secrets.token_hex(16), pin)
        with self._open() as grants:
            grants[token.id] = Grant(token.secret, role.value, topic, time.time() + valid_s, uses, life_s)
        return token

    def use(self, token_id: str, name: Name, request: bytes, mac: str) -> float:
        """Use a token once; return the lifetime of the certificate to issue, in seconds.

        A caller without the secret learns nothing about the token. Raises JoinRefused, AuthorityError.
        """
        with self._open() as grants:
            grant = grants.get(token_id)
            proof = _mac(token_id, grant.secret if grant else "", name, request)
            if not hmac.compare_digest(proof.encode(), mac.encode()) or grant is None:
                raise JoinRefused(f"token {token_id}: this CA does not know it, or the secret is wrong")
            if grant.expires_at <= time.time():
                raise JoinRefused(f"token {token_id} has expired: make another with `baton ca token`")
            if (grant.role, grant.topic) != (name.role, name.topic):
                raise JoinRefused(
                    f"token {token_id} is for {Role(grant.role).one} of topic {grant.topic!r}, not for "
                    f"{name.role.one} of topic {name.topic!r}"
                )
            if grant.uses == 0:
                raise JoinRefused(
                    f"token {token_id} has no uses left: make another with `baton ca token --uses`"
                )
            if grant.uses is not None:
                grant.uses -= 1
            return grant.life_s

    def extend(self, token_id: str, valid_s: float) -> None:
        """Let a token, if it is known, expire `valid_s` seconds from now. Raises AuthorityError."""
        with self._open() as grants:
            if token_id in grants:
                grants[token_id].expires_at = time.time() + valid_s

    def revoke(self, token_id: str) -> bool:
        """Delete a token; return False for an unknown one. Raises AuthorityError."""
        with self._open() as grants:
            return grants.pop(token_id, None) is not None

    def all(self) -> dict[str, Grant]:
        """Return the tokens by id. Raises AuthorityError."""
        with self._open() as grants:
            return dict(grants)

    @contextlib.contextmanager
    def _open(self) -> Iterator[dict[str, Grant]]:
        with kept_json(self._path, "tokens", lambda values: Grant(**values)) as grants:
            for key in [key for key, one in grants.items() if one.expires_at <= time.time() - KEPT_S]:
                del grants[key]
            yield grants


def is_token_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _mac(token_id: str, secret: str, name: Name, request: bytes) -> str:
    said = b"\n".join((token_id.encode(), name.uri.encode(), request))
    return hmac.digest(secret.encode(), said, "sha256").hex()


_SERIAL = re.compile(r"[0-9a-f]{14,40}")  # longer than a token's id


class Revocations:
    """The CA's list of revocations, read at each renewal."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, what: str) -> str:
        """Revoke a serial number or a SPIFFE id; return it in the form of `listed`.

        Raises IdentityError for anything else, and AuthorityError.
        """
        what = listed(what)
        self._add(what)
        return what

    def add_token(self, token_id: str) -> None:
        """Revoke a token by its id. Raises AuthorityError."""
        self._add(token_id)

    def all(self) -> dict[str, float]:
        """Return all revocations with their times (wall clock, seconds). Raises AuthorityError."""
        with self._lock() as found:
            return found

    @contextlib.contextmanager
    def allowing(self, name: Name, line: str, issued: float) -> Iterator[None]:
        """Lock the list while a certificate is renewed. Raises JoinRefused if it was revoked."""
        with self._lock() as found:
            if line in found or found.get(name.uri, 0.0) >= issued:
                raise JoinRefused(f"the certificate of {name} was revoked: join with a token again")
            yield

    def _add(self, what: str) -> None:
        with self._lock() as found:
            found[what] = time.time()  # under the lock, so renewals that preceded it have earlier times

    def _lock(self) -> AbstractContextManager[dict[str, float]]:
        return kept_json(self._path, "revocations", float)


def listed(what: str) -> str:
    """Normalize a serial number, as openssl or a log shows it, or a SPIFFE id. Raises IdentityError."""
    if what.startswith("spiffe:"):
        return Name.parse(what).uri
    serial = what.replace(":", "").lower().lstrip("0")
    if not _SERIAL.fullmatch(serial):
        raise IdentityError(
            f"{what!r} is neither a token's id, nor a certificate's serial number in hex, nor a SPIFFE id "
            "(spiffe://baton/TOPIC/ROLE, of a worker with /ID)"
        )
    return serial


KEY, ROOT, TOKENS, REVOKED = "ca.key", "ca.crt", "tokens.json", "revoked.json"
KEPT = "kept"  # subfolder for revocations, if the other files are copied here at each start
LIFE_S = 3600.0  # default lifetime of a certificate
ROOT_DAYS = 3650
SKEW = 1 / 12  # fraction of its life by which a certificate is backdated, because clocks differ
_CURVE = ec.SECP256R1()


class Authority:
    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises AuthorityError."""
        try:
            self.root_pem = (folder / ROOT).read_bytes()
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
            self._root = x509.load_pem_x509_certificate(self.root_pem)
        except FileNotFoundError:
            raise AuthorityError(
                f"no CA in {folder}: make one with `baton ca init`, or set security.ca or security.join"
            ) from None
        except OSError as error:
            raise AuthorityError(f"cannot read the CA in {error.filename}: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            raise AuthorityError(f"the CA in {folder} cannot be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise AuthorityError(f"the key of the CA in {folder} is not an ECDSA key")
        self._key = key
        self.folder = folder
        self.tokens = TokenStore(folder / TOKENS)
        self.revoked = Revocations((kept if (kept := folder / KEPT).is_dir() else folder) / REVOKED)

    @classmethod
    def create(cls, folder: Path) -> Authority:
        """Create a CA in a folder without one. Raises AuthorityError."""
        if (folder / KEY).exists():
            raise AuthorityError(f"there is a CA in {folder} already")
        key = ec.generate_private_key(_CURVE)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Baton CA")])
        now = datetime.now(UTC)
        root = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=ROOT_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace(folder / ROOT, root.public_bytes(serialization.Encoding.PEM))
            # Last and exclusively, so the second of two concurrent calls fails.
            with open(os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_private(key))
        except OSError as error:
            raise AuthorityError(f"cannot make a CA in {folder}: {error.strerror}") from None
        return cls(folder)

    @classmethod
    def at(cls, folder: Path) -> Authority:
        """Open or create the CA in a folder. Raises AuthorityError."""
        return cls(folder) if (folder / KEY).exists() else cls.create(folder)

    @property
    def pin(self) -> str:
        """The SHA-256 of the CA's public key, in hex."""
        return pin_of(self._root)

    def issue(self, name: Name, life_s: float = LIFE_S) -> Pems:
        """Return a new key and its certificate."""
        key = new_key()
        chain = self._certificate(name, key.public_key(), timedelta(seconds=life_s))
        return Pems(_private(key), chain, self.root_pem)

    def join(self, token_id: str, name: Name, request: bytes, mac: str) -> bytes:
        """Return a certificate for the holder of a token. Raises JoinRefused."""
        life_s = self.tokens.use(token_id, name, request, mac)
        if token_id in self.revoked.all():
            raise JoinRefused(f"token {token_id} was revoked: make another with `baton ca token`")
        return self._certificate(name, _key_in(request), timedelta(seconds=life_s))

    def revoke_token(self, token_id: str) -> bool:
        """Revoke a token, even if the tokens' file is later replaced by an older copy.

        Return False for an unknown token. Raises AuthorityError.
        """
        known = self.tokens.revoke(token_id)
        if known:
            self.revoked.add_token(token_id)
        return known

    def renew(self, certificate: bytes, request: bytes, signature: bytes) -> bytes:
        """Return a new certificate with the same lifetime. Raises JoinRefused.

        signature: of the request, made with the key of the old certificate, which must not have expired.
        """
        try:
            old = x509.load_pem_x509_certificate(certificate)
            old.verify_directly_issued_by(self._root)
            name, key = name_in(old), old.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise JoinRefused("the certificate's key is not an ECDSA key")
            key.verify(signature, request, ec.ECDSA(hashes.SHA256()))
        except (ValueError, TypeError, InvalidSignature, IdentityError):
            raise JoinRefused(
                "the old certificate is not from this CA, or its key did not sign the request"
            ) from None
        if old.not_valid_after_utc <= datetime.now(UTC):
            raise JoinRefused(f"the certificate of {name} has expired: join with a token again")
        life = (old.not_valid_after_utc - old.not_valid_before_utc) / (1 + SKEW)
        # Times in certificates are rounded down to seconds, so a certificate never seems newer than it is.
        issued = old.not_valid_before_utc + life * SKEW
        with self.revoked.allowing(name, line := line_of(old), issued.timestamp()):
            return self._certificate(name, _key_in(request), life, line)

    def _certificate(
        self, name: Name, key: ec.EllipticCurvePublicKey, life: timedelta, line: str = ""
    ) -> bytes:
        now = datetime.now(UTC)
        serial = x509.random_serial_number()
        subject = [x509.NameAttribute(NameOID.SERIAL_NUMBER, line or f"{serial:x}")]
        alternatives = [x509.UniformResourceIdentifier(name.uri), x509.DNSName(name.host)]
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name(subject))
            .issuer_name(self._root.subject)
            .public_key(key)
            .serial_number(serial)
            .not_valid_before(now - life * SKEW)
            .not_valid_after(now + life)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )


def pin_of(root: x509.Certificate) -> str:
    """Return the SHA-256 of a certificate's public key, in hex."""
    encoding, kind = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(root.public_key().public_bytes(encoding, kind)).hexdigest()


def line_of(certificate: x509.Certificate) -> str:
    """Return the serial number of the first certificate in this one's line, in hex."""
    found = certificate.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    return str(found[0].value) if found else f"{certificate.serial_number:x}"


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(_CURVE)


def request_for(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a certificate request in PEM, signed with the key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _key_in(request: bytes) -> ec.EllipticCurvePublicKey:
    try:
        asked = x509.load_pem_x509_csr(request)
    except ValueError as error:
        raise JoinRefused(f"the request for a certificate cannot be read: {error}") from None
    key = asked.public_key()
    if not asked.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise JoinRefused("the request for a certificate is not signed with its own ECDSA key")
    if not isinstance(key.curve, ec.SECP256R1):
        raise JoinRefused("the request's key is not on the curve P-256")
    return key


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
