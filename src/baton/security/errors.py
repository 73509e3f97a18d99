"""Exceptions about certificates and the CA.

BatonError
└── SecurityError
    ├── NotSecured
    ├── IdentityError
    ├── AuthorityError
    ├── TokenError
    ├── NotAsSealed
    └── JoinRefused
        └── CAUnreachable
"""

from baton.errors import BatonError


class SecurityError(BatonError):
    """A process cannot prove its identity, or would do something insecure."""


class NotSecured(SecurityError):
    """A process would accept plain text from other machines."""


class IdentityError(SecurityError):
    """A process has no usable key and certificate."""


class AuthorityError(SecurityError):
    """The CA's folder is missing or cannot be read or written."""


class TokenError(SecurityError):
    """A text is not a token."""


class NotAsSealed(SecurityError):
    """Encrypted data was modified in transit."""


class JoinRefused(SecurityError):
    """The CA issued no certificate."""


class CAUnreachable(JoinRefused):
    """The CA does not answer."""
