"""The page of the benchmarks, its figures and README's section are what the results give."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import report, report_figures
from bench.report_figures import Figure, Panel

HEAD = "# One\nIt fell [from 1 ms to 2 ms](#measured).\n"
FIGURE = Figure(
    "one",
    "Three charts",
    [
        Panel("bars", ["a", "b"], {"ours": [1.0, 2.0], "theirs": [3.0, 40.0]}, "ms"),
        Panel("stacked", ["a", "b"], {"first": [1.0, 2.0], "second": [0.5, 0.25]}, "ms", "stacked"),
        Panel(
            "lines", ["1", "8"], {"ours": [1.0, 200.0], "theirs": [2.0, 300.0]}, "tokens/s", "lines", log=True
        ),
    ],
)


def test_what_is_published_is_what_the_results_give() -> None:
    report.main(["--check"])


def test_a_page_that_was_edited_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = tmp_path / "benchmarks.md"
    edited.write_text(report.PAGE.read_text().replace("ms", "s", 1))
    monkeypatch.setattr(report, "PAGE", edited)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"{HEAD}{report.BEGIN}\nby hand\n{report.END}\n")
    with pytest.raises(SystemExit, match=r"benchmarks\.md, README\.md; run"):
        report.main(["--check"])


def test_readme_keeps_what_surrounds_its_section() -> None:
    results, section = report.load(), f"{report.BEGIN}\nby hand\n{report.END}\n"
    new = report.with_measured(f"{HEAD}{section}\n## Next\n", results)
    head = HEAD.replace("[from 1 ms to 2 ms](#measured)", report.report_brief.headline(results))
    assert new.startswith(f"{head}{report.BEGIN}\n")
    assert new.endswith(f"\n{report.END}\n\n## Next\n")
    assert "by hand" not in new
    for lacks in (HEAD, f"# One\n{section}"):
        with pytest.raises(ValueError, match="has no"):
            report.with_measured(lacks, results)


def test_figures_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        report_figures.draw([FIGURE], tmp_path / folder)
        assert report_figures.differences([FIGURE], tmp_path / folder) == []
    for name in ("one.svg", "one-dark.svg"):
        text = (tmp_path / "a" / name).read_text()
        assert text == (tmp_path / "b" / name).read_text()
        assert ">theirs</text>" in text  # text as text: no machine's fonts


def test_a_figure_of_other_data_fails_the_check(tmp_path: Path) -> None:
    report_figures.draw([FIGURE], tmp_path)
    other = dataclasses.replace(FIGURE, alt="Three other charts")
    assert report_figures.differences([other], tmp_path) == ["one-dark.svg", "one.svg"]
    assert report_figures.differences([], tmp_path) == ["one-dark.svg", "one.svg"]
    report_figures.draw([dataclasses.replace(FIGURE, name="two")], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two-dark.svg", "two.svg"]
    assert report_figures.differences([FIGURE], tmp_path) == [
        "one-dark.svg",
        "one.svg",
        "two-dark.svg",
        "two.svg",
    ]
