"""Explain Redis errors that mean a wrong server, or one that takes no writes now."""

from __future__ import annotations

from redis.exceptions import AskError, ClusterDownError, ReadOnlyError

from baton.redis_link import NotACluster
from baton.redis_url import CLUSTER

_LATER = ("NOREPLICAS", "MISCONF", "TRYAGAIN", "UNBLOCKED", "MASTERDOWN", "CLUSTERDOWN")
_NO_SENTINEL_KNOWS = ("unknown command 'evalsha'", "unknown command 'hget'", "unknown command 'time'")


def leads_elsewhere(error: BaseException, url: str) -> bool:
    """Return whether the URL names the wrong kind of server, so waiting does not help."""
    redirected = isinstance(error, AskError) and not _of_a_cluster(url)  # MovedError is an AskError
    return redirected or isinstance(error, NotACluster) or _is_sentinel(error)


def elsewhere(error: BaseException, url: str, key: str) -> str:
    """Explain such an error in one line, with what to write into `key`; "" for any other error."""
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


def _of_a_cluster(url: str) -> bool:
    return url.partition("://")[0] in CLUSTER


def _is_sentinel(error: BaseException) -> bool:
    text = str(error).lower()
    return any(words in text for words in _NO_SENTINEL_KNOWS)
