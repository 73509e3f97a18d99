"""A command's help: its own arguments and options first, then the configuration's by section."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand


class SectionedCommand(TyperCommand):
    """A command whose help has `rich_help_panel` as headings, without rich's tables, which cut long names."""

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
