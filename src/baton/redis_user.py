"""Explain Redis errors about a user: a wrong password, or missing permissions."""

from __future__ import annotations

from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError

NOT_ENOUGH = "does not allow this user enough ({}); docs/security.md has the ACL that it needs"
WRONG_PASSWORD = "refused the password ({}); put the right one into {}"  # noqa: S105


def refuses_the_user(error: BaseException) -> bool:
    """Return whether the user is unknown, or lacks a permission."""
    known = isinstance(error, AuthenticationError | AuthorizationError)
    return known or _lacks_a_permission(error) or str(error).startswith(("WRONGPASS", "NOAUTH"))


def explained(error: BaseException, where: str) -> str:
    """Explain such an error and its cure in one line. `where`: the settings that may hold the password."""
    text = " ".join(str(error).split())
    return NOT_ENOUGH.format(text) if _lacks_a_permission(error) else WRONG_PASSWORD.format(text, where)


def _lacks_a_permission(error: BaseException) -> bool:
    in_script = "ACL failure", "The user executing the script can't"
    return isinstance(error, NoPermissionError) or any(words in str(error) for words in in_script)
