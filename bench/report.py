"""`python -m bench report [--check]`: docs/benchmarks.md, its figures, and README's section "Measured".

All are written from bench/results/*.json; nothing in them is typed by hand. With `--check` nothing is written:
the exit status is 1 where one of them is not what the results give.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from bench import (
    report_brief,
    report_classes,
    report_figures,
    report_gpu,
    report_peers,
    report_prefixes,
    report_routing,
    report_sections,
    report_simulate,
)
from bench.names import ALONE, NAMES
from bench.report_figures import Figure
from bench.report_sections import Block
from harness.stats import RESULTS
from harness.support import ROOT

SECTIONS = (
    report_sections.SECTIONS
    | report_peers.SECTIONS
    | report_classes.SECTIONS
    | report_prefixes.SECTIONS
    | report_routing.SECTIONS
    | report_simulate.SECTIONS
    | report_gpu.SECTIONS
)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
HEADLINE = re.compile(r"\[from \d+ ms to \d+ ms\]\(#measured\)")
BEGIN, END = "<!-- measured: written by `python -m bench report` -->", "<!-- measured: end -->"
HEAD = f"""# Benchmarks

Written by `python -m bench report` from `bench/results/`. Each section names the command that measures it anew. `make bench`
(about 20 minutes) runs {_names(NAMES)}.
What takes long, or needs more than every machine has, is a run of its own:
{_names(ALONE)}; `make table`.
Figures are medians; where two things are compared they were measured in turns, A B A B, in one run. Unless a section says
otherwise, the model has the shape of Qwen2 with 80 M random parameters in bfloat16: the demo model is too small to keep a
core busy. TTFT is the time to first token, ITL the inter-token latency: the gap between a stream's tokens.
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something differs")
    check = parser.parse_args(arguments).check
    results = load()
    page, figures = render(results)
    readme = with_measured(README.read_text(), results)
    if check:
        wrong = [
            str(file.relative_to(ROOT))
            for file, text in ((PAGE, page), (README, readme))
            if file.read_text() != text
        ]
        wrong += [f"docs/figures/{name}" for name in report_figures.differences(figures)]
        if wrong:
            raise SystemExit(f"not what bench/results gives: {', '.join(wrong)}; run python -m bench report")
        return
    PAGE.write_text(page)
    README.write_text(readme)
    report_figures.draw(figures)
    print(f"wrote docs/benchmarks.md, README.md and {len(figures)} figures in docs/figures")


def load() -> dict[str, dict[str, Any]]:
    """Return the results that are there and have a section, by name."""
    files = {name: RESULTS / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def render(results: dict[str, dict[str, Any]]) -> tuple[str, list[Figure]]:
    """Return the page and its figures. Raises KeyError where a result of its first table is missing."""
    blocks: list[Block] = [HEAD, "## In brief\n", report_brief.brief(results)]
    for name, build in SECTIONS.items():
        if name in results:
            blocks += build(results[name])
    return _markdown(blocks, "figures"), [block for block in blocks if isinstance(block, Figure)]


def with_measured(readme: str, results: dict[str, dict[str, Any]]) -> str:
    """Return README with its headline's figures and its section anew. Raises ValueError where one is missing."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    head, found = HEADLINE.subn(report_brief.headline(results), head)
    if not found:
        raise ValueError(f"README.md has no {HEADLINE.pattern}")
    return f"{head}{BEGIN}\n{_markdown(report_brief.measured(results), 'docs/figures')}{END}{tail}"


def _markdown(blocks: list[Block], folder: str) -> str:
    return "\n".join(block.markdown(folder) if isinstance(block, Figure) else block for block in blocks)
