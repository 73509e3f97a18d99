"""Check that docs/observability.md lists every metric of the code; run this file to print the lists."""

import pytest

from harness.metric_families import declared, registries
from harness.support import ROOT

PAGE = ROOT / "docs" / "observability.md"


def listing(registry):
    lines = []
    for one in declared(registry):
        name = one._name + ("_total" if one._type == "counter" else "")
        labels = f"{{{','.join(one._labelnames)}}}" if one._labelnames else ""
        kind = " (histogram)" if one._type == "histogram" else ""
        lines.append(f"- `{name}{labels}`{kind}: {one._documentation.rstrip('.')}")
    return "\n".join(lines)


@pytest.mark.parametrize("part", ["Worker", "Router", "Scheduler"])
def test_the_page_lists_every_metric(part):
    section = PAGE.read_text().partition(f"\n### {part}\n")[2].partition("\n#")[0]
    assert section.strip() == listing(registries()[part])


if __name__ == "__main__":
    for title, registry in registries().items():
        print(f"### {title}\n\n{listing(registry)}\n")
