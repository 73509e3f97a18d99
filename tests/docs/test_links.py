import re
from urllib.parse import unquote

import pytest

from harness.support import ROOT
from tests.docs.pages import PAGES, Page

INDEX = PAGES["docs/index.md"]
_OUTSIDE = re.compile(r"[a-z]+:")  # https:, mailto:
_ITEM = re.compile(r"(-|1\.) ")


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_links_lead_somewhere(page):
    dead = []
    for link in page.links:
        if _OUTSIDE.match(link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / unquote(target)).resolve() if target else page.path
        if not path.exists():
            dead.append(link)
        elif anchor and path.suffix == ".md" and anchor not in Page(path).anchors:
            dead.append(f"{link} (no such heading)")
    assert not dead, f"{page.name} has dead links: {dead}"


def test_the_index_lists_every_page():
    listed = _linked(INDEX)
    for readme in [page for page in PAGES.values() if page.path.name == "README.md" and page.path in listed]:
        listed |= _linked(readme)  # the index of a folder
    pages = {page.path for name, page in PAGES.items() if name.startswith("docs/")}
    missing = sorted(str(one.relative_to(ROOT)) for one in pages - listed - {INDEX.path})
    assert not missing, f"docs/index.md does not list: {missing}"


def _linked(page):
    return {(page.path.parent / link.partition("#")[0]).resolve() for link in page.links}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_a_list_begins_behind_a_blank_line(page):
    """MkDocs, unlike GitHub, would make it part of the paragraph."""
    before, glued = "", []
    for line in page.prose.splitlines():
        in_text = before.strip() and not before.startswith((" ", "#")) and not _ITEM.match(before)
        if _ITEM.match(line) and in_text:
            glued.append(line)
        before = line
    assert not glued, f"{page.name}: {glued}"
