"""Commands with help by section, and errors for flags of earlier versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer import Typer
from typer.core import TyperArgument, TyperCommand

from baton.services.cli.flags import Of, gone, with_settings
from baton.services.errors import ConfigError


class SectionedCommand(TyperCommand):
    """A command with `rich_help_panel` as headings of its help. rich's own tables would cut long names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for one in self.get_params(ctx) for name in one.opts}
        for flag in (word.partition("=")[0] for word in args):
            if flag not in known and (why := gone(flag)):
                raise ConfigError(f"{flag}: {why}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            usual = "Arguments" if isinstance(parameter, TyperArgument) else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or usual
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def command(
    app: Typer, *settings: str, of: Of = Of.WHOLE, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command of `app`, with the flags of these settings."""
    return lambda run: app.command(name, cls=SectionedCommand)(with_settings(*settings, of=of)(run))
