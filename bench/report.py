"""`python -m bench report [--check]`: write the tables of PAGES, README's section, and figures.

All figures come from bench/results/*.json; the pages keep their prose between the tables. `--check`
writes nothing and fails if a file is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from bench import figures
from bench.options import options
from bench.tables import TABLES, Result, Table
from harness.stats import RESULTS
from harness.support import ROOT

PAGES = [
    ROOT / "docs" / name for name in ("benchmarks.md", "gangs.md", "images.md", "speculative-decoding.md")
]
README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADLINE = re.compile(r"\[from \d+ ms to \d+ ms\]\(#measured\)")
BEGIN, END = "<!-- measured: written by `python -m bench report` -->", "<!-- measured: end -->"

# README's lines: results file, paths to figures, Baton's arm, the other arm, its name, titles by key. For
# tokens/s, higher is better; for everything else, lower is better.
BRIEF: list[tuple[str, list[str], str, str, str, dict[str, str]]] = [
    (
        *("disaggregation", ["median.{arm}.{key}"], "1P1D", "2 aggregated", "two aggregated engines"),
        {
            "itl_max_ms": "longest gap between tokens of short requests beside long prompts, ms",
            "ttft_short_p50_ms": "time to first token of short requests beside long prompts, ms",
            "tokens_per_s": "output tokens/s beside long prompts",
        },
    ),
    (
        *("clients", [f"median.{load}.{{arm}}.{{key}}" for load in (1, 8, 128)]),
        *("baton", "stock", "stock vLLM"),
        {
            "tokens_per_s": "output tokens/s at 1, 8 and 128 concurrent requests",
            "ttft_p50_ms": "time to first token at these loads, p50, ms",
            "itl_p99_ms": "inter-token latency at these loads, p99, ms",
        },
    ),
    (
        *("speculation", ["served.1P1D.mtp + suffix.{key}.1.{arm}"]),
        *("mtp + suffix", "none", "Baton without drafts"),
        {
            one: f"{one} answers with `mtp` and suffixes, ms per output token"
            for one in ("chat", "repetitive")
        },
    ),
    (
        *("fair-share", ["models.qwen2-80m.behind 4.{arm}.{key}"]),
        *("shares, order", "as vLLM does", "vLLM's own order"),
        {"short_p50_ms": "first token of short prompts behind 4 long ones, p50, ms"},
    ),
    (
        *("startup", ["{key}.{arm}"], "baton up", "stock vLLM", "stock vLLM"),
        {"median_s": "from the command to the first token, s"},
    ),
]
BRIEF_NOTE = (
    "The better figure is bold. Figures at 1, 8 and 128 requests are those of `vllm bench serve` with random"
    " prompts: `deploy/laptop.yaml` (1P1D with drafts) against one stock vLLM server (without), on the same"
    " cores."
)
LINK = (
    "All figures, and how they were measured: [docs/benchmarks.md](docs/benchmarks.md)."
    " Each section names its command."
)


def main(arguments: list[str]) -> None:
    check = options(__doc__, arguments, check=False).check
    written = {one: page(one.read_text()) for one in PAGES} | figures.drawn()
    written[README] = with_measured(README.read_text())
    if not check:
        for file, text in written.items():
            file.write_text(text)
    elif wrong := [file.name for file, text in written.items() if file.read_text() != text]:
        raise SystemExit(f"out of date: {', '.join(wrong)}; run python -m bench report")


@cache
def result(name: str) -> Result:
    found: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def page(text: str) -> str:
    """Return the page with its tables updated. Raises KeyError for a table that is not in TABLES."""
    told = ""

    def block(found: re.Match[str]) -> str:
        nonlocal told
        table = TABLES[found[2]]
        before, told = told, taken(result(table.file), table)
        said = f"\n{told}\n" if told != before else ""
        return f"{found[1]}{rendered(table)}\n{said}{found[3]}"

    return _BLOCK.sub(block, text)


def rendered(table: Table) -> str:
    found = result(table.file)
    view = at(found, table.view) if isinstance(table.view, str) else table.view(found)
    columns = list(table.cells())
    rows = [
        [*labels, *(_cell(at(figures, key), shape) for key, _, shape in columns)]
        for labels, figures in _leaves(view, [key for key, _, _ in columns])
    ]
    depth = len(rows[0]) - len(columns)
    labels = [*table.labels, *[""] * depth][:depth]
    lines = [[*labels, *(head for _, head, _ in columns)], *rows]
    if table.turned:
        lines = [list(line) for line in zip(*lines, strict=True)]
    empty = [number for number, cells in enumerate(zip(*lines[1:], strict=True)) if not any(cells)]
    lines = [[cell for number, cell in enumerate(line) if number not in empty] for line in lines]
    return markdown(lines)


def _leaves(node: Any, keys: list[str], labels: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the nodes below this one that have one of the keys, with the labels that lead to them."""
    if any(at(node, key) is not None for key in keys):
        return [(labels, node)]
    children = node.items() if isinstance(node, dict) else ()
    return [leaf for label, child in children for leaf in _leaves(child, keys, (*labels, label))]


def at(node: Any, path: str) -> Any:
    """Return the value at a dotted path, None if a key is missing."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _cell(value: Any, shape: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(_cell(one, shape) for one in value)
    if shape:
        return format(value, shape)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def markdown(lines: list[list[str]]) -> str:
    """Return a Markdown table; the first line is its header."""
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def taken(found: Result, table: Table) -> str:
    """Return the command, machine and date of a table's figures."""
    if table.parts:
        runs = []
        for part in (found[name] for name in table.parts):
            runs += [part["taken"]] if "taken" in part else [one["taken"] for one in part.values()]
        commands: dict[str, dict[str, None]] = {}
        for run in runs:
            where = f"{run['gpu']}, driver {run['driver']}, {run['when']}."
            commands.setdefault(where, {})[f"`{run['command']}`"] = None
        return "\n".join(f"{'; '.join(ran)}; {where}" for where, ran in commands.items())
    machine = found["machine"]
    command = found.get("command") or f"python -m bench {table.file}"
    cpu = machine["cpu"].replace("(R)", "").removesuffix(" Processor")
    return f"`{command}`; {machine['cores']} cores ({cpu}), {machine['when']}."


# README's section


def with_measured(readme: str) -> str:
    """Return README with its headline and section updated. Raises ValueError if one is missing."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    arms = result("disaggregation")["median"]
    theirs, ours = (arms[arm]["itl_max_ms"] for arm in ("2 aggregated", "1P1D"))
    head, found = _HEADLINE.subn(f"[from {theirs:.0f} ms to {ours:.0f} ms](#measured)", head)
    if not found:
        raise ValueError(f"README.md has no {_HEADLINE.pattern}")
    return f"{head}{BEGIN}\n{measured()}\n{END}{tail}"


def measured() -> str:
    machines = [result(name)["machine"] for name in ("disaggregation", "clients", "path", "router")]
    runs = [run for run in result("router")["runs"] if run["interval_ms"]]
    router = max(runs, key=lambda run: run["tokens_per_s"])
    handoff = result("path")
    total = {way: handoff["median_ms"][way]["total"] for way in ("shm", "tcp")}
    return "\n\n".join(
        [
            figures.markdown("docs/figures"),
            f"On {machines[0]['cores']} cores ({', '.join(dict.fromkeys(one['cpu'] for one in machines))}):",
            markdown([["", "Baton", "compared with"], *(line for group in BRIEF for line in _brief(*group))]),
            BRIEF_NOTE,
            f"A handoff of {handoff['tokens']} tokens takes {total['shm']:.0f} ms over shared memory and "
            f"{total['tcp']:.0f} ms over TCP. One router process carries {router['tokens_per_s']:,} "
            f"tokens/s at {router['streams']} streams.",
            LINK,
        ]
    )


def _brief(
    file: str, paths: list[str], ours: str, theirs: str, whose: str, titles: dict[str, str]
) -> Iterator[list[str]]:
    """Yield the cells of each line, with the better figures in bold."""
    for key, title in titles.items():
        best = max if "tokens/s" in title else min
        pairs = [
            [float(at(result(file), path.format(arm=arm, key=key))) for arm in (ours, theirs)]
            for path in paths
        ]
        cells = [", ".join(_bold(pair[arm], pair[arm] == best(pair)) for pair in pairs) for arm in (0, 1)]
        yield [title, cells[0], f"{cells[1]} ({whose})"]


def _bold(value: float, better: bool) -> str:
    cell = f"{value:.1f}" if value < 30 else f"{value:,.0f}"
    return f"**{cell}**" if better else cell
