"""The arguments of a bench."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def options(doc: str | None, arguments: list[str], names: str = "", /, **flags: Any) -> argparse.Namespace:
    """Parse a bench's command line. A flag is its default, or a tuple of default, help and choices.

    A type instead of a default means a default of None. A list makes a repeatable flag of several values; a
    list of a type is empty by default. `names` is the help for positional arguments; without it there are
    none.
    """
    parser = argparse.ArgumentParser(
        prog=" ".join(["python -m bench", *sys.argv[1:2]]),
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if names:
        parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    lists: dict[str, list[Any]] = {}
    for name, flag in flags.items():
        default, text, choices = (*flag, None, None)[:3] if isinstance(flag, tuple) else (flag, None, None)
        more: dict[str, Any] = {"help": text}
        if default is False:
            more["action"] = "store_true"
        elif isinstance(default, list):
            kind = default[0] if default and isinstance(default[0], type) else type(default[0])
            lists[name] = [] if default[0] is kind else default
            more |= {"type": kind, "nargs": "*", "action": "extend", "choices": choices}
        elif isinstance(default, type):
            more |= {"type": default, "choices": choices}
        else:
            more |= {"type": type(default), "default": default, "choices": choices}
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    found = parser.parse_args(arguments)
    for name, default in lists.items():
        if getattr(found, name) is None:
            setattr(found, name, default)
    return found
