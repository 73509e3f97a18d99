"""Explain Redis errors: wrong server or password, missing permission, or a server that is read-only."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    NoPermissionError,
    ReadOnlyError,
)

from baton.redis_link import NotACluster
from baton.redis_url import CLUSTER, PASSWORD_FILE

NOT_ENOUGH = "does not allow this user enough ({}); docs/security.md has the ACL that it needs"
WRONG_PASSWORD = "refused the password ({}); put the right one into {}"  # noqa: S105
_LATER = ("NOREPLICAS", "MISCONF", "TRYAGAIN", "UNBLOCKED", "MASTERDOWN", "CLUSTERDOWN")
_NO_SENTINEL_KNOWS = ("unknown command 'evalsha'", "unknown command 'hget'", "unknown command 'time'")


def refuses_the_user(error: BaseException) -> bool:
    """Return whether the user is unknown, or lacks a permission."""
    known = isinstance(error, AuthenticationError | AuthorizationError)
    return known or _lacks_a_permission(error) or str(error).startswith(("WRONGPASS", "NOAUTH"))


def refusal(client: Redis, url: str, error: BaseException, key: str) -> str:
    """Explain in one line that Redis refuses this user or is the wrong server; "" for other errors.

    key: the setting with the URL
    """
    if not refuses_the_user(error):
        return hide_password(client, elsewhere(error, url, key))
    text = " ".join(str(error).split())
    if _lacks_a_permission(error):
        return hide_password(client, NOT_ENOUGH.format(text))
    return hide_password(client, WRONG_PASSWORD.format(text, f"{key} or its {PASSWORD_FILE}"))


def hide_password(client: Redis, text: str) -> str:
    """Hide the client's password: a server quotes the arguments of an unknown command."""
    password = client.connection_pool.connection_kwargs.get("password")
    return text.replace(password, "***") if password else text


def leads_elsewhere(error: BaseException, url: str) -> bool:
    """Return whether the URL names the wrong kind of server, so waiting does not help."""
    redirected = isinstance(error, AskError) and not _of_a_cluster(url)  # MovedError is an AskError
    return redirected or isinstance(error, NotACluster) or _is_sentinel(error)


def elsewhere(error: BaseException, url: str, key: str) -> str:
    """Explain in one line that this server is wrong or takes no writes now; "" for other errors.

    `key`: the setting with the URL.
    """
    text, words = " ".join(str(error).split()), ""
    if isinstance(error, NotACluster):
        words = f"has no cluster mode: write redis://HOST:PORT/DB into {key}"
    elif isinstance(error, AskError) and _of_a_cluster(url):
        words = f"is moving this topic's slot to another node ({text}), which is tried next"
    elif isinstance(error, AskError):
        words = f"is a node of a Redis Cluster, and this topic is on another one ({text}): write "
        words += f"redis+cluster://HOST:PORT into {key}"
    elif _is_sentinel(error):
        words = f"is not a Redis but a Sentinel ({text}): write redis+sentinel://HOST:PORT/MASTER into {key}"
    elif isinstance(error, ReadOnlyError) or "READONLY" in text:
        words = f"is a replica, and takes no writes: write the master's address into {key}, or a URL with "
        words += "redis+sentinel:// or redis+cluster://, which finds it"
    elif isinstance(error, ClusterDownError) or text.startswith(_LATER):  # includes MasterDownError
        words = f"takes no writes for now ({text})"
    return words


def _lacks_a_permission(error: BaseException) -> bool:
    in_script = "ACL failure", "The user executing the script can't"
    return isinstance(error, NoPermissionError) or any(words in str(error) for words in in_script)


def _of_a_cluster(url: str) -> bool:
    return url.partition("://")[0] in CLUSTER


def _is_sentinel(error: BaseException) -> bool:
    text = str(error).lower()
    return any(words in text for words in _NO_SENTINEL_KNOWS)
