"""The router's own fields of a body."""

from __future__ import annotations

import msgspec
import pytest

from baton.services.router.fields import own_fields


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"messages": [{"model": "inner"}], "model": "a", "x": {"model": "b"}}', "a"),
        (b'{"model": "a", "model": "b"}', "b"),  # as Python's parser, which vLLM uses
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
def test_own_fields_are_those_of_the_body_itself(body: bytes, model: object) -> None:
    own = own_fields(body)
    assert own.model == model
    assert own.baton is msgspec.UNSET
