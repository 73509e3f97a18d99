"""The CA's server: `baton ca serve`.

It speaks HTTPS, because Python's gRPC cannot fetch a certificate that it does not trust yet.

    GET  /ca      the CA's certificate
    POST /join    {"token", "name", "request", "mac"}: a certificate for the holder of a token
    POST /renew   {"certificate", "request", "signature"}: a new certificate for the holder of one

An answer is a certificate in PEM, or one line of text with status 400 or 403.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web
from cryptography import x509

from baton import addresses
from baton.keeping import keep
from baton.security import identity
from baton.security.authority import Authority, line_of
from baton.security.errors import IdentityError, JoinRefused, SecurityError
from baton.security.names import Name, Role

MAX_BODY = 16 << 10
READ_S = 10.0  # limit for receiving a request's body
CONNECTION_S = 20.0  # limit for a connection with its handshake; a joiner sends one request
MOST_CONNECTIONS = 256  # more are closed
ACCEPT_AGAIN_S = 0.5  # pause after an error, such as a lack of file descriptors
OWN_LIFE_S = 86_400.0  # lifetime of the service's own certificate
RENEW_S = OWN_LIFE_S / 2
RETRY_S = 60.0  # pause after a failed renewal
_FOLDER = "service"  # subfolder for the service's own certificate

log = logging.getLogger(__name__)


class JoinService:
    """Serve while entered. Raises SecurityError on entry when it cannot listen."""

    def __init__(self, authority: Authority, topic: str, listen: str) -> None:
        """Serve the CA for one topic on `listen` (host:port)."""
        self._authority = authority
        self._name = Name(topic, Role.CA)
        self.address = listen  # has the actual port once entered
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/ca", self._ca)
        app.router.add_post("/join", self._answering(self._join))
        app.router.add_post("/renew", self._answering(self._renew))
        self._runner = web.AppRunner(app, access_log=None)
        self._tasks: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[None]] = set()  # accepted connections

    async def __aenter__(self) -> Self:
        self._take_certificate()
        await self._runner.setup()
        host, port = addresses.split(self.address)
        try:
            listening = addresses.listen(host, port)
        except OSError as error:
            await self._runner.cleanup()
            raise SecurityError(
                f"the CA cannot listen on {self.address}: {error.strerror}; give another --listen"
            ) from None
        listening.setblocking(False)
        self._listening = listening
        self.address = addresses.join(host, listening.getsockname()[1])
        self._tasks = [
            keep(self._renew_own, "the CA's own certificate"),
            keep(self._accept, "the CA's connections"),
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = [*self._tasks, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()
        await self._runner.cleanup()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                log.warning("the CA cannot accept a connection: %s; trying again", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection), name="a connection to the CA")
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _serve(self, connection: socket.socket) -> None:
        assert self._runner.server is not None  # noqa: S101 (the runner is set up)
        watched = _Watched(self._runner.server())
        with connection, contextlib.suppress(TimeoutError, OSError):  # the client is slow or leaves
            async with asyncio.timeout(CONNECTION_S):
                transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: watched, connection, ssl=self._context
                )
                try:
                    await watched.over.wait()
                finally:
                    transport.abort()

    def _take_certificate(self) -> None:
        folder = self._authority.folder / _FOLDER
        identity.write(folder, self._authority.issue(self._name, OWN_LIFE_S))
        self._context.load_cert_chain(folder / identity.CHAIN, folder / identity.KEY)

    async def _renew_own(self) -> None:
        problem = ""
        while True:
            await asyncio.sleep(RETRY_S if problem else RENEW_S)
            before = problem
            try:
                self._take_certificate()  # used by connections from now on
                problem = ""
            except (SecurityError, OSError) as error:  # OSError: a full disk, or one from OpenSSL
                problem = str(error)
            if problem and problem != before:
                log.error("the CA's own certificate was not renewed: %s; trying again", problem)
            elif before and not problem:
                log.info("the CA's own certificate was renewed")

    async def _ca(self, _: web.Request) -> web.Response:
        return web.Response(body=self._authority.root_pem)

    def _join(self, asked: dict[str, Any]) -> bytes:
        name = Name.parse(str(asked["name"]))
        if name.topic != self._name.topic:
            raise JoinRefused(f"this is topic {self._name.topic!r}, not {name.topic!r}")
        request = str(asked["request"]).encode()
        given = self._authority.join(str(asked["token"]), name, request, str(asked["mac"]))
        line = line_of(x509.load_pem_x509_certificate(given))
        log.info("%s joins with token %s, serial number %s", name.uri, asked["token"], line)
        return given

    def _renew(self, asked: dict[str, Any]) -> bytes:
        return self._authority.renew(
            str(asked["certificate"]).encode(),
            str(asked["request"]).encode(),
            bytes.fromhex(str(asked["signature"])),
        )

    def _answering(self, act: Callable[[dict[str, Any]], bytes]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            try:
                async with asyncio.timeout(READ_S):
                    asked = json.loads(await request.read())
                # In a thread: the tokens' file may be locked, and signing takes a moment.
                return web.Response(body=await asyncio.to_thread(act, asked))
            except (KeyError, TypeError, ValueError, RecursionError, TimeoutError, IdentityError) as error:
                problem, status = f"the request cannot be read: {error}", 400
            except JoinRefused as error:
                problem, status = str(error), 403
            log.warning("refused %s from %s: %s", request.path, request.remote, problem)
            return web.Response(text=problem, status=status)

        return answer


class _Watched(asyncio.Protocol):
    """Pass events on to one of the web server's connections, and make its end awaitable."""

    def __init__(self, served: asyncio.Protocol) -> None:
        self._served = served
        self.over = asyncio.Event()
        self.data_received = served.data_received  # type: ignore[method-assign]
        self.eof_received = served.eof_received  # type: ignore[method-assign]
        self.pause_writing = served.pause_writing  # type: ignore[method-assign]
        self.resume_writing = served.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._served.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._served.connection_lost(error)
        self.over.set()
