"""Parse the repository's Markdown pages: headings, links, code."""

import os
import re
from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.support import ROOT

_SKIPPED = {"site", "build", "dist"}
_FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^ *\2 *$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"(?<!\\)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_HTML = re.compile(r"(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


Block = namedtuple("Block", "language text")  # a fenced block; its language is "" for none


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self):
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self):
        return self.path.read_text()

    @cached_property
    def prose(self):
        return _FENCE.sub("", self.text)

    @cached_property
    def blocks(self):
        return [Block(found[3].strip(), found[4]) for found in _FENCE.finditer(self.text)]

    @cached_property
    def code(self):
        return [" ".join(found[2].split()) for found in _CODE.finditer(self.prose)]

    @cached_property
    def links(self):
        text = _CODE.sub("code", self.prose)
        return [found[2] for found in _LINK.finditer(text)] + _HTML.findall(text)

    @cached_property
    def anchors(self):
        seen = {}
        anchors = set()
        for heading in _HEADING.findall(self.prose):
            plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
            anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            times = seen[anchor] = seen.get(anchor, -1) + 1
            anchors.add(f"{anchor}-{times}" if times else anchor)
        return anchors


def _walk():
    for folder, inside, files in os.walk(ROOT):
        inside[:] = sorted(one for one in inside if not one.startswith(".") and one not in _SKIPPED)
        yield from (Page(Path(folder, one)) for one in sorted(files) if one.endswith(".md"))


PAGES = {page.name: page for page in _walk()}
