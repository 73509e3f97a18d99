import json
import time
from itertools import pairwise

import pytest

from baton.services.router.errors import TooLarge, Unsupported
from baton.services.router.http import body as module
from baton.services.router.http.body import Budget, read

LARGEST = 8 << 20
PIECE = 64 << 10


def counted(body, piece=PIECE):
    one = Budget()
    for at in range(0, len(body), piece):
        one.take(body[at : at + piece])
    one.finish(body)
    return one


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize(
    ("body", "values", "texts", "items", "depth"),
    [
        (rb'{"a": "x\"[{,\\", "b": [{"c": 1} ,  {"d": [[]]}]}', 8, 5, 2, 5),
        (b"[1, 2, [3]]", 4, 0, 0, 2),
        (b'[ { } , "," ]', 3, 1, 1, 2),
        (b"", 0, 0, 0, 0),
    ],
)
def test_counts_do_not_depend_on_the_pieces(body, values, texts, items, depth, piece):
    got = counted(body, piece)
    assert (got.values, got.texts, got.items, got.depth) == (values, texts, items, depth)


@pytest.mark.parametrize("piece", [1, 2, 5, 6, 7, 11, 1000])
@pytest.mark.parametrize(
    ("text", "lone"),
    [
        (r"\ud83d\ude00", False),
        (r"\uD83D\uDE00 and \ud83d\ude00", False),
        (r"\ud83d", True),
        (r"\ude00", True),
        (r"\ud83d\ud83d\ude00", True),
        (r"\ud83d\ude00\ude00", True),
        (r"\ud83d\\ude00", True),
        (r"\\ud83d", False),
        (r"\\\ud83d", True),
        (r"\ud83dx\ude00", True),
        ("\\ud83d" + "x" * 40 + "\\ude00", True),
    ],
)
def test_an_unpaired_surrogate_is_found(text, lone, piece):
    body = f'{{"a": "{text}"}}'.encode()
    assert counted(body, piece).lone_surrogates is lone
    try:
        json.loads(body)["a"].encode()
    except UnicodeEncodeError:
        assert lone
    else:
        assert not lone


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (b"[" + b"{}," * (module.MAX_ITEMS + 1) + b"1]", TooLarge, "objects in lists or more; 8192"),
        (b"[" + b"[]," * (module.MAX_CONTAINERS + 1) + b"1]", TooLarge, "lists and objects"),
        (b"[" + b"1," * (module.MAX_VALUES + 1) + b"1]", TooLarge, "values"),
        (b"[" + b'"",' * (module.MAX_TEXTS + 1) + b"1]", TooLarge, "strings and names of fields"),
        (b"[" * (module.MAX_DEPTH + 1), TooLarge, "201 levels or more; 200"),
        (b"1" * 65, Unsupported, "more than 64 characters"),
        (b"[" + b"1" * 40 + b"." + b"1" * 40 + b"]", Unsupported, "more than 64 characters"),
        (b'{"top_k": ' + b"1" * 60 + b"}", Unsupported, "an integer that does not fit into 64 bits: 1111"),
        (b'{"a": -9223372036854775809}', Unsupported, "64 bits"),
        (b'{"a": 18446744073709551616}', Unsupported, "64 bits"),
        (b'{"a": NaN}', Unsupported, "not finite"),
        (b'{"a": -Infinity}', Unsupported, "not finite"),
        (b'{"a": 1e400}', Unsupported, "not finite"),
        ('{"a": 1}'.encode("utf-16"), Unsupported, "not UTF-8"),
        (b'{"a": "\xff"}', Unsupported, "not UTF-8 at byte 7"),
        (b'{"a": "\xed\xa0\xbd"}', Unsupported, "not UTF-8 at byte 7"),
        (b'{"a": "\xf0\x9f', Unsupported, "not UTF-8 at byte 7"),
    ],
)
@pytest.mark.parametrize("piece", [13, PIECE])
def test_bodies_beyond_the_budget_are_refused(body, error, words, piece):
    with pytest.raises(error, match=words):
        counted(body, piece)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "' + b"NaN Infinity 1e400 " + b"1" * 100 + b'", "b": true, "c": 1.5e-07, "d": -0.25E+10}',
        b"[" * 200 + b"]" * 200,
        b'{"a": [18446744073709551615, -9223372036854775808, 0.12345678901234567890123456789, 1]}',
        b"[" + b"12345678901234567890123456.5, 1e10, 0.1234567890123456789012345, " * 500 + b"1]",
        b"[" + b"1," * 400_000 + b"1]",
        json.dumps({"a": "\u00e9\U0001f600" * 1000}, ensure_ascii=False).encode(),
        b"\xef\xbb\xbf{}",
        b"]" * 1000,  # where any parser stops at the first byte
    ],
)
@pytest.mark.parametrize("piece", [7, 61, PIECE])
def test_bodies_within_the_budget_pass(body, piece):
    counted(body, piece)


@pytest.mark.parametrize(
    "unit", [b"Hello. ", b"\\\\", b'\\"', b"\\ud83d\\ude00", "\u00e9\u4e2d".encode(), b" ", b"a\\n"]
)
def test_the_largest_body_does_not_block_the_loop(unit):
    body = b'{"prompt":"' + unit * (LARGEST // len(unit)) + b'"}'
    one, times = Budget(), [time.thread_time()]
    for at in range(0, len(body), PIECE):
        one.take(body[at : at + PIECE])
        times.append(time.thread_time())
    steps = sorted(later - earlier for earlier, later in pairwise(times))
    assert steps[len(steps) // 2] < 0.02  # 0.2 to 3 ms of a core
    assert one.values == 1


class Arrival:
    """A body that arrives in pieces; its client may leave after them."""

    def __init__(self, *pieces, leaves=False):
        self.asked = 0
        self._messages = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces) or leaves}
            for number, piece in enumerate(pieces, 1)
        ]

    async def __call__(self):
        self.asked += 1
        if self.asked > len(self._messages):
            return {"type": "http.disconnect"}
        return self._messages[self.asked - 1]


async def test_a_body_in_pieces_is_read_whole():
    assert await read(Arrival(b'{"a"', b"", b": 1}")) == b'{"a": 1}'
    assert await read(Arrival(b"")) == b""


async def test_a_client_that_leaves_has_no_body():
    assert await read(Arrival(b'{"a"', leaves=True)) is None


async def test_a_refused_body_is_read_to_its_end():
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
async def test_an_unpaired_surrogate_is_refused_with_its_place(body, place):
    with pytest.raises(Unsupported, match=f"^{place}: an unpaired surrogate"):
        await read(Arrival(body))
