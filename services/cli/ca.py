"""The commands `baton ca ...`: the CA of a deployment with security.tls, and its join tokens."""

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
    "On one machine, `baton up --secure` needs none of this. For several machines, run `baton ca init` once, "
    "`baton ca serve` on the same machine, and `baton ca token` for the processes on the others.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Joiner(StrEnum):
    worker = "worker"
    router = "router"
    scheduler = "scheduler"
    operator = "operator"


@command(app, "security.ca")
def init(settings: Settings) -> None:
    """Create a CA, in a folder that only you can read."""
    from baton.security.authority import Authority

    made = Authority.create(expanded(settings.security.ca, "security.ca"))
    print(f"a CA in {made.folder}; SHA-256 of its key: {made.pin}")


@command(app, "security.ca", "scheduler.topic")
def token(
    settings: Settings,
    role: Annotated[Joiner, typer.Option(help="Role of the processes that join with it.")],
    uses: Annotated[int, typer.Option(help="How many times it may be used; 0: any number.", min=0)] = 1,
    valid_s: Annotated[float, typer.Option(help="How long it may be used, in seconds.", min=1)] = _HOUR_S,
    life_s: Annotated[
        float,
        typer.Option(help="Lifetime of each certificate, in seconds; renewed after half of it.", min=10),
    ] = _HOUR_S,
) -> None:
    """Print a token for joining, once or --uses times.

    A restarted process joins again, unless its security.folder still has its certificate.
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
    """Revoke a token, or certificates: all those of a SPIFFE id, or one and its renewals.

    A revoked token can no longer be used to join; processes that joined with it stay. A revoked certificate
    is not renewed, but stays valid until it expires. Also revoke any token with which its holder could
    rejoin.
    """
    from baton.security.authority import is_token_id

    authority, token_id = _authority(settings), what.partition(".")[0]
    if not is_token_id(token_id):
        print(f"{authority.revoked.add(what)} is revoked: it will not be renewed")
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
    """Issue certificates to holders of a token, and renew them.

    It always listens with TLS.
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
