"""Errors of identities and of the CA.

BatonError
└── SecurityError
    ├── NotSecured       something would listen to other machines in plain text
    ├── IdentityError    a process has no usable certificate
    ├── AuthorityError   the CA's folder is missing or cannot be read
    ├── TokenError       a token cannot be read
    ├── NotAsSealed      encrypted data was changed on its way
    └── JoinRefused      the CA refuses a certificate
        └── CAUnreachable  it does not answer
"""

from baton.errors import BatonError


class SecurityError(BatonError):
    """A process cannot show who it is, or must not do what it was told to."""


class NotSecured(SecurityError):
    """A process would listen to other machines in plain text."""


class IdentityError(SecurityError):
    """The folder holds no usable key and certificate."""


class AuthorityError(SecurityError):
    """The folder holds no CA."""


class TokenError(SecurityError):
    """A text is not a token."""


class NotAsSealed(SecurityError):
    """Encrypted data was changed on its way."""


class JoinRefused(SecurityError):
    """The CA gave no certificate."""


class CAUnreachable(JoinRefused):
    """The CA does not answer."""
