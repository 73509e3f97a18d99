import dataclasses

import pytest

from bench import figures, report
from bench.tables import TABLES, Table

HEAD = "# One\nIt fell [from 1 ms to 2 ms](#measured).\n"
SECTION = f"{report.BEGIN}\nby hand\n{report.END}\n"


def test_pages_show_the_results():
    report.main(["--check"])


def test_every_table_is_on_a_page():
    text = "".join(one.read_text() for one in report.PAGES)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []


def test_a_page_that_was_edited_fails_the_check(tmp_path, monkeypatch):
    edited = tmp_path / "benchmarks.md"
    edited.write_text(report.PAGES[0].read_text().replace("| 1P1D |", "| 2P2D |", 1))
    monkeypatch.setattr(report, "PAGES", [edited])
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"{HEAD}{SECTION}")
    with pytest.raises(SystemExit, match=r"benchmarks\.md, README\.md; run"):
        report.main(["--check"])


def test_a_table_shows_figures_by_the_labels_on_their_way(monkeypatch):
    arms = {"a": {"x": {"ms": 12.345, "share": 0.5}}, "b": {"y": {"ms": 1234.5, "deep": {"n": 1234}}}}
    monkeypatch.setattr(report, "result", lambda _: {"arms": arms})
    columns = "ms; share|.0%; deep.n=n; absent=none has this"
    table = Table("one", "arms", columns, ("arm",))
    rows = "| a | x | 12.3 | 50% |  |\n| b | y | 1,234 |  | 1,234 |"
    assert report.rendered(table) == f"| arm |  | ms | share | n |\n|---|---|---|---|---|\n{rows}"
    turned = dataclasses.replace(table, view="arms.a", columns="ms", turned=True)
    assert report.rendered(turned) == "| arm | x |\n|---|---|\n| ms | 12.3 |"


def test_only_the_section_of_readme_is_rewritten():
    new = report.with_measured(f"{HEAD}{SECTION}\n## Next\n")
    assert new.startswith("# One\nIt fell [from ")
    assert "from 1 ms to 2 ms" not in new
    assert new.endswith(f"\n{report.END}\n\n## Next\n")
    assert "by hand" not in new
    for lacks in (HEAD, f"# One\n{SECTION}"):
        with pytest.raises(ValueError, match="has no"):
            report.with_measured(lacks)


def test_the_figure_shows_the_longest_gaps():
    light, dark = figures.drawn().values()
    assert light != dark
    for arm in report.result("disaggregation")["median"].values():
        assert f">{arm['itl_max_ms']:.0f}</text>" in light
