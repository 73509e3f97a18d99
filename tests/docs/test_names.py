import re
from pathlib import Path

import pytest

from baton.services.cli.flags import flag_name
from baton.services.config import Settings
from harness.support import ROOT
from tests.docs.pages import PAGES

FOLDERS = "autoscale|bench|deploy|docs|handoff|harness|kernels|protos|scheduler|services|src/baton|tests"
PRODUCT = ("services", "autoscale", "scheduler", "handoff")
PATH = re.compile(rf"(?:{FOLDERS})/[\w./-]*")
WRITTEN = "bench/results/"  # benches write files there
MODULE = re.compile(r"(?:baton|bench|harness|tests)(?:\.\w+)+")
NAME_IN_FILE = re.compile(r"`(\w[\w.]*)(?:\(\))?` (?:in |\()`([\w./-]+\.(?:py|proto))`")
FUNCTION = re.compile(r"((?:\w+\.)?\w+)\(\)")
SETTING = re.compile(r"(\w+)\.([a-z]\w*)(?:\.\w+)*")


METRICS = set(re.findall(r"^- `(baton_\w+)", PAGES["docs/observability.md"].text, re.MULTILINE))
METRIC = re.compile(r"\b(baton_(?:router|scheduler|worker)_\w+?)(?:_sum|_count|_bucket)?\b")


def _is_defined(name, source):
    definition = rf"^ *(?:(?:async )?def|class|message) {name}\b|^ *{name}\b[^=\n]* = "
    return bool(re.search(definition, source, re.MULTILINE))


def _is_importable(dotted):
    """Return whether a module has this name or defines it, without importing anything."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = Path(ROOT / "src" if parts[0] == "baton" else ROOT, *parts[:length])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if module.is_file():
            return all(_is_defined(one, module.read_text()) for one in parts[length:])
        if place.is_dir():
            return length == len(parts)
    return False


def _is_a_name(dotted):
    """Return whether the code quotes this name, such as a logger or a group of entry points."""
    return any(f'"{dotted}"' in one.read_text() for room in PRODUCT for one in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_paths_and_modules_exist(page):
    missing = []
    for code in page.code:
        if PATH.fullmatch(code) and not code.startswith(WRITTEN) and not (ROOT / code).exists():
            missing.append(code)
        if MODULE.fullmatch(code) and not _is_importable(code) and not _is_a_name(code):
            missing.append(code)
    assert not missing, f"{page.name} names what is not there: {missing}"


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_names_are_in_their_files(page):
    """A file defines the name in "`name` in `file`" and in "`name` (`file`)"."""
    missing = []
    for name, file in NAME_IN_FILE.findall(page.prose):
        source = (ROOT / file).read_text()
        missing += [f"{one} in {file}" for one in name.split(".") if not _is_defined(one, source)]
    assert not missing, f"{page.name}: these files do not define what the page says: {missing}"


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_settings_exist(page):
    unknown = []
    for code in page.code:
        found = SETTING.fullmatch(code.partition(":")[0].partition("=")[0])
        if not found or code.endswith((".py", ".md", ".json", ".proto", ".yaml", ".lua")):
            continue
        section = Settings.model_fields.get(found[1])
        keys = getattr(section and section.annotation, "model_fields", None)
        if keys is not None and found[2] not in keys:
            unknown.append(code)
    assert not unknown, f"{page.name} names settings that are not there: {unknown}"


def test_flags_follow_from_the_configuration_page():
    """The page names a key's flag unless its own rule gives that flag."""
    text = PAGES["docs/configuration.md"].text
    prefixed = re.findall(r"\w+", re.search(r"in the sections ([\w, \n]+) it begins", text)[1])
    listed = re.findall(r"^- `(\w+)\.(\w+)(?:: [^`]*)?`(?: \(`([^`]+)`\))?:", text, re.MULTILINE)
    told = {}
    for section, key, named in listed:
        dashed = key.replace("_", "-")
        told[section, key] = named or (f"--{section}-{dashed}" if section in prefixed else f"--{dashed}")
    assert {section for section, _ in told} >= {"engine", "router", "handoff"}
    assert told == {pair: flag_name(*pair) for pair in told}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_metrics_exist(page):
    """tests/services/test_observability_page.py checks docs/observability.md itself."""
    unknown = {name for name in METRIC.findall(page.text) if name not in METRICS}
    assert not unknown, f"{page.name} names metrics that are not there: {sorted(unknown)}"


def test_functions_of_the_map_are_where_it_says():
    """A table row of docs/architecture.md that names functions also names their files."""
    missing = []
    for row in (line for line in PAGES["docs/architecture.md"].prose.splitlines() if line.startswith("|")):
        code = re.findall(r"`([^`]+)`", row)
        sources = [(ROOT / one).read_text() for one in code if (ROOT / one).is_file()]
        for found in filter(None, map(FUNCTION.fullmatch, code)):
            if not any(all(_is_defined(one, text) for one in found[1].split(".")) for text in sources):
                missing.append(found[0])
    assert not missing, f"docs/architecture.md: these are not in the files of their rows: {missing}"
