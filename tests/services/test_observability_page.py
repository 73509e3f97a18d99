"""Check that docs/observability.md lists every metric of the code; run this file to print the tables."""

import pytest

from harness.metric_families import declared, registries
from harness.support import ROOT

PAGE = ROOT / "docs" / "observability.md"


def table(registry):
    rows = ["| metric (`_total`: a counter) | type, labels | what |", "| --- | --- | --- |"]
    for one in declared(registry):
        name = one._name + ("_total" if one._type == "counter" else "")
        kind = ", ".join(one._labelnames if one._type == "counter" else (one._type, *one._labelnames))
        rows.append(f"| `{name}` | {kind} | {one._documentation.rstrip('.')} |")
    return "\n".join(rows)


@pytest.mark.parametrize("part", ["Worker", "Router", "Scheduler"])
def test_the_page_lists_every_metric(part):
    section = PAGE.read_text().partition(f"\n### {part}\n")[2].partition("\n#")[0]
    listed = section[section.index("| metric") :].strip()
    assert listed == table(registries()[part])


if __name__ == "__main__":
    for title, registry in registries().items():
        print(f"### {title}\n\n{table(registry)}\n")
