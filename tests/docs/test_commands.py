import importlib.util
import re
import shlex
from functools import cache

import pytest
import typer

from baton.services.cli.main import app
from bench.names import ALONE, NAMES
from harness.support import ROOT
from tests.docs.pages import PAGES

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SHELL = ("", "bash", "sh")
_HEREDOC = re.compile(r"<<'?(\w+)'?(.*)\n(?:.*\n)*?\1\n")
_SEPARATORS = {"&", "&&", "|", ";", "||", ">", "<"}


def _commands(script):
    lines = _HEREDOC.sub(r"\2\n", script).replace("\\\n", " ").splitlines()
    for line in lines:
        words = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in _SEPARATORS:
                words.append(word)
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words[:1] in (["baton"], ["make"]) or words[:2] == ["python", "-m"]:
                yield words
            words = []


def _inline(page):
    for code in page.code:
        if re.match(r"(?:[A-Z_]+=\S+ )*(?:baton [a-z]|make |python -m )", code):
            yield from _commands(re.sub(r"[\[\]]", "", code).replace("...", ""))


def _check(words, *, whole):
    """Raise for an invalid command. whole: required arguments must be present, too."""
    if words[0] == "baton":
        check_baton(words[1:], whole=whole)
    elif words[0] == "make":
        named = [one for one in words[1:] if "=" not in one]
        assert set(named) <= TARGETS, f"make has no target {set(named) - TARGETS}"
    else:
        _check_module(words[2:])


@cache
def _baton():
    """Return Baton's command line. Building it takes a quarter of a second."""
    return typer.main.get_command(app)


def check_baton(words, *, whole):
    group = _baton()
    context = group.make_context("baton", list(words))
    name, command, arguments = group.resolve_command(context, words)
    while hasattr(command, "resolve_command"):  # a group, as `baton ray`
        if not arguments and not whole:
            return
        context = command.make_context(name, list(arguments), parent=context)
        name, command, arguments = command.resolve_command(context, arguments)
    if whole:
        command.make_context(name, arguments, parent=context)
    else:
        command.make_parser(context).parse_args(arguments)


def _check_module(words):
    module, *arguments = words
    assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
    if module == "bench" and arguments:
        assert arguments[0] in (*NAMES, *ALONE, "all", "report"), f"bench has no {arguments[0]}"


def _is_script(text):
    return bool(re.search(r"^(?:baton|make|python|source|curl|PYTHONPATH)", text, re.MULTILINE))


def _cases():
    """Yield the page and words of each command, and whether it is in a script."""
    for page in PAGES.values():
        scripts = [block.text for block in page.blocks if block.language in SHELL and _is_script(block.text)]
        yield from ((page.name, tuple(words), True) for text in scripts for words in _commands(text))
        yield from ((page.name, tuple(words), False) for words in _inline(page))


CASES = list(dict.fromkeys(_cases()))


@pytest.mark.parametrize(
    ("words", "whole"),
    [case[1:] for case in CASES],
    ids=[f"{page}: {shlex.join(words)[:60]}" for page, words, _ in CASES],
)
def test_a_command_can_be_given(words, whole):
    _check(list(words), whole=whole)


def test_pages_have_commands():
    """The test above proves nothing if no commands are found."""
    assert {"baton", "make", "python"} == {words[0] for _, words, _ in CASES}
    assert len(CASES) > 40
