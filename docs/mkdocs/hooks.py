"""The two things that MkDocs does not do by itself: a navigation from docs/index.md, and links to code.

Pages link to files of the repository by relative paths (`../services/...`), which work on GitHub and in an
editor. In the site they become links into the repository that `git remote` names, or plain text without one.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
_REMOTE = re.compile(r"(?:https://|ssh://)?(?:[^@/]+@)?([\w.-]+\.\w+)(?::\d+/|[:/])(.+?)(?:\.git)?/?")
_SECTION = re.compile(r"^## (.+)$|^- \[([^\]]+)\]\(([^)#]+\.md)\)", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Set the navigation and, where it is known, the repository's address."""
    config.repo_url = _repository()
    config.nav = _navigation((ROOT / "docs" / "index.md").read_text())
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links out of docs/ pointing into the repository.

    Raises FileNotFoundError for a broken link.
    """
    del files
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def absolute(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return link[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {path}, which does not exist")
        return f"[{text}]({config.repo_url}/blob/main/{path}{anchor})" if config.repo_url else text

    return _LINK.sub(absolute, markdown)


def _navigation(index: str) -> list[dict[str, Any]]:
    """Return MkDocs' `nav` from the index: a group for each `##` heading, an entry for each item's link."""
    groups: list[dict[str, Any]] = [{"Overview": ["index.md"]}]
    for heading, title, page in _SECTION.findall(index):
        if heading:
            groups.append({heading: []})
        else:
            next(iter(groups[-1].values())).append({title: page})
    return groups


def _repository() -> str:
    """Return the web address of the remote `origin`, or "" if there is none."""
    command = ["git", "config", "--get", "remote.origin.url"]
    try:
        remote = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
    found = _REMOTE.fullmatch(remote)
    return f"https://{found[1]}/{found[2]}" if found else ""
