import json

import msgspec
import pytest

from baton.services.classes import Classes, ClassesSettings
from baton.services.router.errors import NotAllowed, Unsupported
from baton.services.router.fields import Own, by_body, by_default, by_header, own_fields
from baton.services.tenants.model import ANYBODY, Caller, Limits, Tenant

CLASSES = Classes(ClassesSettings.model_validate({"night": {"priority": 50, "patience_s": 60}}))


def caller(key=None, **tenant):
    return Caller("a key", "acme", Limits(**(key or {})), Tenant(**tenant))


def name(found):
    return found.name if found is not None else None


def test_a_key_names_its_default():
    assert by_default(CLASSES, ANYBODY).name == "interactive"
    assert by_default(CLASSES, caller(default_class="batch")).name == "batch"
    assert by_default(CLASSES, caller({"default_class": "night"}, default_class="batch")).name == "night"
    assert by_default(CLASSES, caller(classes=["night", "batch"])).name == "batch"  # the first of them
    with pytest.raises(Unsupported, match="default class of this API key: there is no class 'gone'"):
        by_default(CLASSES, caller(default_class="gone"))
    with pytest.raises(NotAllowed, match="no class"):
        by_default(CLASSES, caller({"classes": ["batch"]}, classes=["night"]))


def test_a_header_chooses_what_the_key_may_use():
    header = [(b"accept", b"*/*"), (b"x-baton-class", b"batch")]
    assert name(by_header(CLASSES, ANYBODY, header)) == "batch"
    assert by_header(CLASSES, ANYBODY, header[:1]) is None
    with pytest.raises(Unsupported, match=r"x-baton-class: there is no class 'bach'; .*interactive, batch"):
        by_header(CLASSES, ANYBODY, [(b"x-baton-class", b"bach")])
    with pytest.raises(NotAllowed, match="may not use class 'batch', but interactive") as refused:
        by_header(CLASSES, caller(classes=["interactive"]), header)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("body", "chosen"),
    [
        ({}, None),
        ({"service_tier": "auto", "priority": 0}, None),
        ({"service_tier": None}, None),
        ({"service_tier": "flex"}, "batch"),
        ({"service_tier": "priority", "priority": 10}, "interactive"),
        ({"priority": 10}, "batch"),
        ({"priority": 49}, "batch"),
        ({"priority": 1_000_000}, "night"),
        ({"priority": 3}, "interactive"),
        ({"priority": -3}, "interactive"),
        ({"priority": "high"}, None),  # the front end refuses it
        ({"messages": [{"content": '"service_tier": "flex"'}]}, None),
        ([], None),
    ],
)
def test_a_body_chooses_by_openais_tier_or_vllms_number(body, chosen):
    assert name(by_body(CLASSES, ANYBODY, own_fields(json.dumps(body).encode()))) == chosen


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"service_tier": "fast"}, Unsupported),
        ({"service_tier": 3}, Unsupported),
        ({"service_tier": "flex"}, NotAllowed),
    ],
)
def test_a_body_that_chooses_wrong_is_refused(body, error):
    with pytest.raises(error):
        by_body(CLASSES, caller(classes=["interactive"]), own_fields(json.dumps(body).encode()))


def test_a_number_chooses_among_what_the_key_may_use():
    assert name(by_body(CLASSES, caller(classes=["batch", "night"]), Own(priority=3))) == "batch"
    assert name(by_body(CLASSES, caller(classes=["interactive"]), Own(priority=99))) == "interactive"
    assert by_body(CLASSES, ANYBODY, own_fields(b'{"priority": ')) is None


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"messages": [{"model": "inner"}], "model": "a", "x": {"model": "b"}}', "a"),
        (b'{"model": "a", "model": "b"}', "b"),  # vLLM uses Python's parser, which takes the last one
        (rb'{"mod\u0065l": "a"}', "a"),
        ('{"model": "gr\u00fc\u00df"}'.encode(), "gr\u00fc\u00df"),
        (b'\xef\xbb\xbf{"model": "a"}', "a"),
        (b'{"model": null}', None),
        (b'{"model": 7}', 7),
        (b"{}", None),
        (b"[]", None),
        (b'"model"', None),
        (b"", None),
        (b'{"model": "a"', None),
        (b"\xff\xfe\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_own_fields_are_read_from_the_top_level_only(body, model):
    own = own_fields(body)
    assert own.model == model
    assert own.baton is msgspec.UNSET
