"""The commands `baton key`: keys and tenants, in a file or in Redis."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.services import credentials
from baton.services.cli.help import command
from baton.services.cli.tables import UNLIMITED, Column, fitted
from baton.services.config import Settings
from baton.services.errors import ConfigError
from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import ApiKey, Book, Limits, Tenant, checked, digest, new_secret
from baton.services.tenants.redis_book import RedisBook

PLACE = ("router.keys_file", "router.keys_store", "scheduler.topic")

keys = typer.Typer(
    name="key",
    help="Add, list and remove API keys, and set tenants' limits. Routers apply changes within a second.",
    no_args_is_help=True,
)

KeyName = Annotated[str, typer.Argument(metavar="NAME", help="The key's name.")]
RequestsPerS = Annotated[int | None, typer.Option(help="Most requests per second.", min=1)]
TokensPerMin = Annotated[
    int | None, typer.Option(help="Most tokens per minute, prompt and output together.", min=1)
]
Concurrency = Annotated[int | None, typer.Option(help="Most requests at a time.", min=1)]
DefaultClass = Annotated[str | None, typer.Option(help="Class of requests that name none.")]
ClassNames = Annotated[
    str | None, typer.Option("--classes", help="Allowed classes, separated by commas. [all]")
]


@command(keys, *PLACE)
def add(
    settings: Settings,
    *,
    name: KeyName,
    tenant: Annotated[str, typer.Option(help="Its tenant. [default: the key's name]")] = "",
    requests_per_s: RequestsPerS = None,
    tokens_per_min: TokensPerMin = None,
    concurrency: Concurrency = None,
    default_class: DefaultClass = None,
    classes: ClassNames = None,
) -> None:
    """Add a key, and print its secret once: only its hash is stored.

    The limits apply to this key, within those of its tenant.
    """
    secret = new_secret()
    key = checked(
        ApiKey,
        tenant=tenant or name,
        sha256=digest(secret.encode()).hex(),
        requests_per_s=requests_per_s,
        tokens_per_min=tokens_per_min,
        concurrency=concurrency,
        default_class=default_class,
        classes=_listed(classes),
    )
    _with_book(settings, lambda book: book.edit(lambda held: held.with_key(name, key)))
    print(secret)


@command(keys, *PLACE)
def remove(settings: Settings, name: KeyName) -> None:
    """Remove a key. Its running requests finish."""
    _with_book(settings, lambda book: book.edit(lambda held: held.without_key(name)))


@command(keys, *PLACE)
def tenant(
    settings: Settings,
    *,
    name: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")],
    requests_per_s: RequestsPerS = None,
    tokens_per_min: TokensPerMin = None,
    concurrency: Concurrency = None,
    default_class: DefaultClass = None,
    classes: ClassNames = None,
    priority: Annotated[
        int,
        typer.Option(help="Its turns in the queue, for each turn of a tenant of priority 1.", min=1),
    ] = 1,
    cache_salt: Annotated[
        bool, typer.Option(help="Keep its prefix cache separate from other tenants'.")
    ] = True,
) -> None:
    """Set a tenant's limits, which its keys share. Limits that are not given are removed."""
    made = checked(
        Tenant,
        requests_per_s=requests_per_s,
        tokens_per_min=tokens_per_min,
        concurrency=concurrency,
        default_class=default_class,
        classes=_listed(classes),
        priority=priority,
        cache_salt=cache_salt,
    )
    _with_book(settings, lambda book: book.edit(lambda held: held.with_tenant(name, made)))


@command(keys, *PLACE, name="list")
def list_(settings: Settings) -> None:
    """List keys and tenants."""
    book = _with_book(settings, lambda place: place.changed()) or Book()
    console = Console(width=UNLIMITED, highlight=False)
    width = console.width if not sys.stdout.isatty() else Console().width
    console.print(fitted("Keys", _KEYS, sorted(book.keys.items()), width))
    tenants = sorted({*book.tenants, *(key.tenant for key in book.keys.values())})
    console.print(fitted("Tenants", _TENANTS, [(name, book.tenant(name)) for name in tenants], width))


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]


def _classes(row: tuple[str, Limits]) -> str:
    """Return the allowed classes; the default comes first, with a star."""
    default, names = row[1].default_class, row[1].classes
    shown = [f"{default}*"] if default else []
    return ", ".join(shown + [name for name in names or () if name != default]) or "-"


def _limit(field: str) -> Callable[[tuple[str, Limits]], str]:
    return lambda row: str(getattr(row[1], field) or "-")


_LIMITS: list[Column[Any]] = [
    Column("requests/s", _limit("requests_per_s"), number=True, rank=3),
    Column("tokens/min", _limit("tokens_per_min"), number=True, rank=3),
    Column("at a time", _limit("concurrency"), number=True, rank=2),
]
_CLASSES: Column[Any] = Column("classes", _classes, rank=1)
_KEYS: list[Column[tuple[str, ApiKey]]] = [
    Column("key", lambda row: row[0]),
    Column("tenant", lambda row: row[1].tenant),
    *_LIMITS,
    Column("SHA-256 begins", lambda row: row[1].sha256[:8], rank=1),
    _CLASSES,
]
_TENANTS: list[Column[tuple[str, Tenant]]] = [
    Column("tenant", lambda row: row[0]),
    *_LIMITS,
    Column("priority", lambda row: str(row[1].priority), number=True, rank=2),
    Column("prefix cache", lambda row: "its own" if row[1].cache_salt else "shared", rank=1),
    _CLASSES,
]


def _with_book(settings: Settings, use: Callable[[FileBook | RedisBook], Awaitable[Any]]) -> Any:
    """Call `use` with the book that the settings name. Raises ConfigError and BookError."""

    async def used() -> Any:
        router = settings.router
        if router.keys_file:
            place: FileBook | RedisBook = FileBook(router.keys_file)
        elif router.keys_store:
            password = credentials.keys_store_password(router)
            place = RedisBook(router.keys_store, settings.scheduler.topic, password)
        else:
            raise ConfigError("say where the keys are: --keys-file FILE or --keys-store redis://HOST:PORT/0")
        try:
            return await use(place)
        finally:
            await place.close()

    return asyncio.run(used())
