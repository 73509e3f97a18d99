"""The commands `baton ca ...`: the CA of a deployment with security.tls, and tokens to join with."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from baton.home import expanded
from baton.services import logs
from baton.services.cli.help import command
from baton.services.config import Settings
from baton.services.errors import ServiceError
from baton.services.printing import guard

if TYPE_CHECKING:
    from baton.security.authority import Authority

LISTEN = "127.0.0.1:7443"
_HOUR_S = 3600.0

app = typer.Typer(
    name="ca",
    short_help="Certificates of a deployment with security.tls.",
    help="Certificates for a deployment with security.tls: docs/security.md.\n\n"
    "On one machine, `baton up --secure` needs none of this. For several: `baton ca init` once, "
    "`baton ca serve` on the same machine, and `baton ca token` for the processes of the others.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Joiner(StrEnum):
    """The roles that can join."""

    worker = "worker"
    router = "router"
    scheduler = "scheduler"
    operator = "operator"


@command(app, "security.ca")
def init(settings: Settings) -> None:
    """Make a CA, in a folder that only you can read."""
    from baton.security.authority import Authority

    made = Authority.create(expanded(settings.security.ca, "security.ca"))
    print(f"a CA in {made.folder}; SHA-256 of its key: {made.pin}")


@command(app, "security.ca", "scheduler.topic")
def token(
    settings: Settings,
    role: Annotated[Joiner, typer.Option(help="Role of the processes that join with it.")],
    uses: Annotated[int, typer.Option(help="How often it may be used; 0: any number of times.", min=0)] = 1,
    valid_s: Annotated[float, typer.Option(help="For how long it may be used, in seconds.", min=1)] = _HOUR_S,
    life_s: Annotated[
        float,
        typer.Option(help="Life of each certificate, in seconds; it is renewed at half of that.", min=10),
    ] = _HOUR_S,
) -> None:
    """Print a token to join with, once or --uses times.

    A process that is restarted joins again, unless its security.folder still holds a certificate of its own.
    """
    from baton.security.names import Role

    authority = _authority(settings)
    made = authority.tokens.add(
        Role(role.value),
        settings.deployment,
        valid_s=valid_s,
        uses=uses or None,
        life_s=life_s,
        pin=authority.pin,
    )
    print(made)


@command(app, "security.ca")
def tokens(settings: Settings) -> None:
    """List the tokens, without their secrets."""
    for token_id, grant in _authority(settings).tokens.all().items():
        left_s = grant.expires_at - time.time()
        state = f"{left_s:.0f} s left" if left_s > 0 else "expired"
        uses = "any number of uses" if grant.uses is None else f"{grant.uses} uses left"
        print(f"{token_id}  {grant.role} of topic {grant.topic}, {state}, {uses}")


@command(app, "security.ca")
def revoke(
    settings: Settings,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="A token's id, a certificate's serial number in hex, or a SPIFFE id."
        ),
    ],
) -> None:
    """Revoke a token, or certificates: all of a SPIFFE id, or one and those that it was renewed into.

    The token can no longer be used to join; processes that joined with it stay. Certificates are no longer
    renewed, and stay good until they expire. Also revoke a token with which their holder could join again.
    """
    from baton.security.tokens import is_token_id

    authority, token_id = _authority(settings), what.partition(".")[0]
    if not is_token_id(token_id):
        print(f"{authority.revoked.add(what)} is revoked: it is not renewed any more")
    elif authority.revoke_token(token_id):
        print(f"{token_id} is revoked")
    else:
        raise ServiceError(f"no token {token_id!r}; `baton ca tokens` lists them")


@command(app, "security.ca")
def revoked(settings: Settings) -> None:
    """List revoked certificates, by serial number or SPIFFE id, and revoked tokens, by id."""
    for what, when in _authority(settings).revoked.all().items():
        print(f"{what}  since {datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S} UTC")


@command(app, "security.ca", "scheduler.topic")
def serve(
    settings: Settings,
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 takes a free one.")] = LISTEN,
) -> None:
    """Give certificates to holders of a token, and renew them.

    It listens with TLS, whatever the address.
    """
    from baton.security.join_service import JoinService
    from baton.signals import until_ending

    guard()
    logs.configure(settings.log_format, "ca")
    authority = _authority(settings)

    async def run() -> None:
        async with JoinService(authority, settings.deployment, listen) as service:
            logging.getLogger(__name__).info("the CA of %s listens on %s", authority.folder, service.address)
            await until_ending().wait()

    asyncio.run(run())


def _authority(settings: Settings) -> Authority:
    from baton.security.authority import Authority

    return Authority(expanded(settings.security.ca, "security.ca"))
