"""`replace` wraps a function once per wrapper, in call order, and only if its parameters match."""

import re
from types import ModuleType

import pytest

from baton.services.engine.patches.replace import check, replace, wrappers
from baton.services.errors import StartError


class Shipped:
    """Stands in for a class of vLLM."""

    def method(self, text):
        return text

    @staticmethod
    def plain(text):
        return text

    @classmethod
    def made(cls, text):
        return f"{cls.__name__} {text}"


def inner(original, *args):
    return f"({original(*args)})"


def outer(original, *args):
    return f"[{original(*args)}]"


def spelled_out(original, self, text):
    return f"<{original(self, text)}>"


@pytest.fixture
def shipped():
    return type("Own", (Shipped,), dict(vars(Shipped)))


def test_a_second_call_does_nothing(shipped):
    for wrapper in (inner, outer, inner, outer):
        replace(shipped, "method", wrapper, ("self", "text"))
    assert shipped().method("a") == "[(a)]"
    assert wrappers(shipped, "method") == (inner, outer)
    assert shipped.method.__wrapped__.__wrapped__ is Shipped.method


def test_expected_parameters_are_those_of_ours_by_default(shipped):
    replace(shipped, "method", spelled_out)
    assert shipped().method("a") == "<a>"
    with pytest.raises(StartError, match=re.escape("made(self, text)")):
        replace(shipped, "made", spelled_out)


@pytest.mark.parametrize(
    ("name", "expects", "said"), [("made", ("cls", "text"), "(Own a)"), ("plain", ("text",), "(a)")]
)
def test_class_methods_and_static_methods_stay_such(shipped, name, expects, said):
    for _ in range(2):
        replace(shipped, name, inner, expects)
    assert [getattr(one, name)("a") for one in (shipped, shipped())] == [said, said]
    assert wrappers(shipped, name) == (inner,)


def test_single_objects_and_modules(shipped):
    replace(shipped, "method", inner, ("self", "text"))
    one, module = shipped(), ModuleType("shipped")
    replace(one, "method", outer, ("text",))
    assert (one.method("a"), shipped().method("a")) == ("[(a)]", "(a)")
    module.function = lambda text: text
    replace(module, "function", inner, ("text",))
    assert module.function("a") == "(a)"


@pytest.mark.parametrize(
    ("name", "expects"),
    [("method", ("self", "words")), ("method", ("self",)), ("made", ("text",)), ("gone", ("self",))],
)
def test_another_signature_is_refused(shipped, name, expects):
    problem = re.escape(f"has no {__name__}.Own.{name}({', '.join(expects)}): install the vLLM version")
    for refused in (lambda: replace(shipped, name, inner, expects), lambda: check(shipped, name, expects)):
        with pytest.raises(StartError, match=problem):
            refused()
    assert shipped().method("a") == "a"
