"""Renew a process's certificate before it expires, in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from baton.keeping import keep_thread
from baton.security.errors import SecurityError
from baton.security.identity import Credentials, Identity, Pems, write

logger = logging.getLogger(__name__)

TRIES = 20  # spread over the second half of a certificate's life


class Renewal:
    """Renew a certificate halfway through its life. Failed attempts are repeated until it has expired."""

    def __init__(self, mine: Identity, renew: Callable[[Credentials], Pems]) -> None:
        """Start the thread. renew: returns a new key and certificate, or raises SecurityError."""
        self._mine = mine
        self._renew = renew
        self._stop = threading.Event()
        self._thread = keep_thread(self._run, "baton-certificate")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        wait_s = self._until_half()
        while not self._stop.wait(max(0.0, wait_s)):
            last = self._mine.current()
            half_s = (last.ends - last.half_life).total_seconds()
            try:
                write(self._mine.folder, self._renew(last))
            except SecurityError as error:
                left_s = last.seconds_left()
                if left_s <= 0:
                    logger.error("the certificate has expired, and could not be renewed: %s", error)  # noqa: TRY400
                    return
                logger.warning("the certificate expires in %.0f s, and was not renewed: %s", left_s, error)
                wait_s = half_s / TRIES
            else:
                logger.info("the certificate was renewed")
                wait_s = self._until_half()

    def _until_half(self) -> float:
        return (self._mine.current().half_life - datetime.now(UTC)).total_seconds()
