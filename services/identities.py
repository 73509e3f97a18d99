"""Give a process its certificate, from the source that the settings name.

security.join     the CA's service: join with a token, renew with the last certificate
security.folder   a folder whose files another program renews, if security.join is unset
security.ca       the CA's own folder, on its machine
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton import addresses, rpc
from baton.home import expanded
from baton.security import exposure
from baton.security.names import Name, Role
from baton.services import credentials
from baton.services.config import SecuritySettings, Settings

if TYPE_CHECKING:  # plain text needs no cryptography
    from baton.security.identity import Credentials, Identity, Pems

JOIN_WAIT_S = 15.0  # the CA may be starting at the same time
_TEMPORARY = "baton-identity-"
_YOUNG_S = 60.0  # a new folder may not be locked yet


def take_on(settings: Settings, role: Role, worker_id: str = "") -> None:
    """Give this process its identity and keep it renewed, or let it use plain text if security.tls is off.

    Call once, before any server or channel is made. Raises SecurityError and ConfigError.
    """
    own = settings.security
    if not own.tls:
        rpc.act_as(None, insecure=own.insecure)
        return
    name = Name(settings.deployment, role, worker_id)
    rpc.act_as(_joined(own, name) if own.join else _given(own, name) if own.folder else _issued(own, name))


def check(settings: Settings) -> None:
    """Raise NotSecured if a part would listen to other machines in plain text."""
    if settings.security.tls or settings.security.insecure:
        return
    listen = {
        "scheduler.address": settings.scheduler.address,
        "worker.listen": settings.worker.listen,
        "handoff.listen": settings.handoff.host,
    }
    for key, given in listen.items():
        for address in filter(None, given.split(",")):  # there may be several schedulers
            exposure.check(key, addresses.split(address.strip())[0])


def _joined(own: SecuritySettings, name: Name) -> Identity:
    from baton.security import joining
    from baton.security.authority import Token
    from baton.security.errors import IdentityError
    from baton.security.identity import Identity

    renew = partial(joining.renew, own.join)
    folder = expanded(own.folder, "security.folder") if own.folder else _temporary()
    try:
        mine = Identity(folder)
        if mine.name != name or mine.current().seconds_left() <= 0:
            raise IdentityError(f"the certificate in {folder} has expired, or is for {mine.name.uri}")
    except IdentityError:  # none yet, or an unusable one
        token = Token.parse(credentials.token(own))
        return _kept(folder, joining.join(own.join, token, name, JOIN_WAIT_S), renew)
    return _kept(folder, None, renew)


def _given(own: SecuritySettings, name: Name) -> Identity:
    from baton.security.errors import IdentityError
    from baton.security.identity import Identity

    mine = Identity(expanded(own.folder, "security.folder"))
    if mine.name != name:
        raise IdentityError(
            f"security.folder: the certificate in {own.folder} is for {mine.name.uri}; this is {name.uri}"
        )
    return mine


def _issued(own: SecuritySettings, name: Name) -> Identity:
    from baton.security.authority import Authority

    authority = Authority(expanded(own.ca, "security.ca"))
    return _kept(_temporary(), authority.issue(name), lambda last: authority.issue(last.name))


def _kept(folder: Path, first: Pems | None, renew: Callable[[Credentials], Pems]) -> Identity:
    """Write the first certificate, if any; return the folder's identity and keep it renewed."""
    from baton.security import identity
    from baton.security.renewal import Renewal

    if first is not None:
        identity.write(folder, first)
    mine = identity.Identity(folder)
    Renewal(mine, renew)
    return mine


def _temporary() -> Path:
    """Return a folder that exists as long as this process; remove folders that killed processes left.

    Each live process locks its folder. A process id would not do, because containers may share /tmp.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # another user's, or already removed
            if time.time() - left.stat().st_mtime > _YOUNG_S and (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    made = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    _lock(made)  # held until this process and its children have ended
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _lock(folder: Path) -> int | None:
    """Lock a folder; return the descriptor with the lock, or None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
