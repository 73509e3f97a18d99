"""A body is read to its end, within its budget."""

from __future__ import annotations

from typing import Any

import pytest

from baton.services.router.errors import TooLarge, Unsupported
from baton.services.router.http.body import read


class Arrival:
    """A body that arrives in pieces; its client may leave after them."""

    def __init__(self, *pieces: bytes, leaves: bool = False) -> None:
        self.asked = 0
        self._messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces) or leaves}
            for number, piece in enumerate(pieces, 1)
        ]

    async def __call__(self) -> Any:
        self.asked += 1
        if self.asked > len(self._messages):
            return {"type": "http.disconnect"}
        return self._messages[self.asked - 1]


async def test_a_body_in_pieces_is_read_whole() -> None:
    assert await read(Arrival(b'{"a"', b"", b": 1}")) == b'{"a": 1}'
    assert await read(Arrival(b"")) == b""


async def test_a_client_that_leaves_has_no_body() -> None:
    assert await read(Arrival(b'{"a"', leaves=True)) is None


async def test_a_refused_body_is_read_to_its_end() -> None:
    arrival = Arrival(b"[" + b"{}," * 9_000, b"{}," * 9_000, b"1]")
    with pytest.raises(TooLarge, match="objects in lists"):
        await read(arrival)
    assert arrival.asked == 3


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (rb'{"stop": "\ud83d"}', "stop"),
        (rb'{"bad_words": ["a", "b\ude00"]}', r"bad_words\[1\]"),
        (rb'{"messages": [{"role": "user", "content": "\ud83d"}]}', r"messages\[0\].content"),
        (rb'{"tools": [{"function": {"\ud83d": 1}}]}', r"tools\[0\].function \(a name of a field\)"),
        (rb'[["\ud83d"]]', r"\[0\]\[0\]"),
        (rb'{"a": "\ud83d', "the body"),
    ],
)
async def test_an_unpaired_surrogate_is_refused_with_its_place(body: bytes, place: str) -> None:
    with pytest.raises(Unsupported, match=f"^{place}: an unpaired surrogate"):
        await read(Arrival(body))
