"""Read a request's whole body, within a budget, before any handler sees it.

A few bytes of JSON can become an object of a hundred bytes, so a body's contents are counted as its bytes
arrive. Counting takes 30 ms for 8 MiB of text, 400 ms for 8 MiB of escaped surrogates (in steps of at most
10 ms), and 14 us for a chat of 3 KB. A body that is not JSON is counted correctly up to its first error,
where any parser stops.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from json import detect_encoding
from typing import Any

from starlette.types import Message, Receive

from baton.services.router.errors import RequestFailed, TooLarge, Unsupported

PIECE = 64 << 10  # bytes counted before other tasks get a turn
MAX_DEPTH = 200  # levels; the deepest schema that vLLM accepts (64) has 140
MAX_VALUES = 1 << 19  # a prompt of half a million token ids, which Python parses in 80 ms
MAX_TEXTS = 1 << 17  # strings, including field names
MAX_CONTAINERS = 1 << 15  # lists and objects
MAX_ITEMS = 1 << 13  # objects in lists: messages, parts, tools, calls
MAX_NUMBER = 64  # characters

_OPEN, _CLOSE = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPEN + _CLOSE))
_SPACE = b" \t\r\n"
_IN_NUMBERS = bytes(0x30 if byte in b"0123456789.eE+-" else 0x20 for byte in range(256))
_LONG_NUMBER = b"0" * (MAX_NUMBER + 1)
_LARGE_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3}")
_OVERLAP = MAX_NUMBER + 1
_DIGITS = b"0" * 19
_INTEGER = re.compile(rb"(?<=[^0-9.eE+-])-?[0-9]{19,}(?=[^0-9.eE+-])")  # not part of a fraction
# An unpaired surrogate, with enough context on both sides to recognize it.
_LONE = re.compile(
    rb"(?<=.{6})\\u[dD](?:[89abAB]..(?=.{6})(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])",
    re.DOTALL,
)
_CONTEXT = 18  # bytes of the previous piece to search again: an escape, with 6 bytes on each side
_utf8 = codecs.getincrementaldecoder("utf-8")


async def read(receive: Receive) -> bytes | None:
    """Return a request's body, or None if the client leaves.

    Raises TooLarge or Unsupported, but only once the whole body has arrived: clients do not read a response
    before they have sent everything. Bytes after the error are discarded.
    """
    budget = Budget()
    pieces: list[bytes] = []
    problem: RequestFailed | None = None
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        if problem is None and (body := message.get("body", b"")):
            pieces.append(body)
            try:
                await _count(budget, body)
            except RequestFailed as error:
                problem = error
                pieces.clear()
        if not message.get("more_body", False):
            break
    if problem is not None:
        raise problem
    whole = b"".join(pieces)
    budget.finish(whole)
    if budget.lone_surrogates:
        raise Unsupported(
            f"{lone_surrogate(whole)}: an unpaired surrogate, as in text that was cut inside a character"
        )
    return whole


async def _count(budget: Budget, body: bytes) -> None:
    if len(body) <= PIECE:
        budget.take(body)
        return
    for at in range(0, len(body), PIECE):
        budget.take(body[at : at + PIECE])
        await asyncio.sleep(0)


def lone_surrogate(body: bytes) -> str:
    """Return the path of the first text with an unpaired surrogate, such as `messages[0].content`."""
    try:
        found = _surrogate_in(json.loads(body))
    except (ValueError, RecursionError):
        found = None
    return found.removeprefix(".") if found else "the body"


def _surrogate_in(value: Any) -> str | None:
    if isinstance(value, str):
        return "" if _is_broken(value) else None
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = ((f".{name}", one, name) for name, one in value.items())
    elif isinstance(value, list):
        pairs = ((f"[{number}]", one, "") for number, one in enumerate(value))
    for place, one, name in pairs:
        if _is_broken(name):
            return " (a name of a field)"
        if (within := _surrogate_in(one)) is not None:
            return f"{place}{within}"
    return None


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body that has already been read, then the messages after it."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def given() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return given


class Budget:
    """Counts a body's contents. Raises TooLarge (413) beyond a limit, Unsupported (400) for invalid JSON."""

    __slots__ = (
        *("_before", "_decoder", "_depth", "_ended", "_escapes", "_last", "_quotes", "_tail", "bytes"),
        *("containers", "depth", "items", "lone_surrogates", "values"),
    )

    def __init__(self) -> None:
        self.bytes = self.values = self.containers = self.items = self.depth = 0
        self.lone_surrogates = False
        self._quotes = 0
        self._depth = 0  # nesting at the last byte
        self._ended = False  # after an unmatched closing bracket, where any parser stops
        self._tail = b""  # a trailing backslash: the character that it escapes has not arrived
        self._last = b""  # the last non-space byte outside strings
        self._before = b""  # the last bytes outside strings
        self._escapes = b" " * _CONTEXT  # the last bytes, where an unpaired surrogate may begin
        self._decoder: codecs.IncrementalDecoder | None = None  # set at the first byte that is not ASCII

    @property
    def texts(self) -> int:
        return (self._quotes + 1) // 2

    def take(self, piece: bytes) -> None:
        """Count the next piece, about 64 KiB at most, which blocks the loop for a few milliseconds."""
        if not self.bytes:
            check_encoding(piece)
        self._check_text(piece)
        self.bytes += len(piece)
        if self._ended:
            return
        if self._tail or b"\\" in piece:
            piece = self._without_escapes(piece)
        if b"\\u" in piece or b"\\u" in self._escapes:
            self._look_for_surrogates(piece)
        else:
            self._escapes = (self._escapes + piece[-_CONTEXT:])[-_CONTEXT:]
        in_text = self._quotes % 2
        parts = piece.split(b'"')
        self._quotes += len(parts) - 1
        outside = b'"'.join(parts[in_text::2])
        if outside:
            self._count(outside)
        _within(self.texts, MAX_TEXTS, "strings and names of fields")

    def finish(self, body: bytes) -> None:
        """Check what can be judged only at the end of the body."""
        check_encoding(body)
        self._check_text(b"", final=True)
        self._look_for_surrogates(b" " * _CONTEXT)

    def _check_text(self, piece: bytes, *, final: bool = False) -> None:
        if self._decoder is None:
            if piece.isascii():
                return
            self._decoder = _utf8()
        held = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(piece, final)
        except UnicodeDecodeError as error:
            at = self.bytes - held + error.start
            raise Unsupported(f"the body is not UTF-8 at byte {at}: {error.reason}") from None

    def _without_escapes(self, piece: bytes) -> bytes:
        """Replace escaped backslashes and quotes, so that every remaining quote delimits a string."""
        piece = (self._tail + piece).replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if piece.endswith(b"\\"):
            self._tail = b"\\"
            return piece[:-1]
        self._tail = b""
        return piece

    def _count(self, outside: bytes) -> None:
        self._check_numbers(outside)
        opens = outside.count(b"[") + outside.count(b"{")
        self.containers += opens
        self.values += opens + outside.count(b",")
        _within(self.values, MAX_VALUES, "values")
        _within(self.containers, MAX_CONTAINERS, "lists and objects")
        if b"{" in outside:
            dense = self._last + outside.translate(None, _SPACE)
            self.items += dense.count(b"[{") + dense.count(b",{")
            _within(self.items, MAX_ITEMS, "objects in lists")
        self._last = outside.rstrip(_SPACE)[-1:] or self._last
        self._descend(outside.translate(None, _NOT_BRACKETS))

    def _check_numbers(self, outside: bytes) -> None:
        near = self._before + outside
        self._before = near[-_OVERLAP:]
        if b"NaN" in near or b"Infinity" in near or _LARGE_EXPONENT.search(near):
            raise Unsupported(
                "the body has a number that is not finite: NaN and Infinity are not JSON, and an exponent "
                "may have two digits"
            )
        if len(near) < len(_DIGITS) or _DIGITS not in (digits := near.translate(_IN_NUMBERS)):
            return
        if _LONG_NUMBER in digits:
            raise Unsupported(f"the body has a number of more than {MAX_NUMBER} characters")
        for found in _INTEGER.finditer(near):
            if not -(1 << 63) <= int(found[0]) < 1 << 64:  # messages to workers cannot encode larger integers
                raise Unsupported(
                    f"the body has an integer that does not fit into 64 bits: {found[0].decode()}"
                )

    def _descend(self, brackets: bytes) -> None:
        depth = self._depth
        for bracket in brackets:
            if bracket in _OPEN:
                depth += 1
                if depth > self.depth:
                    self.depth = depth
                    _within(depth, MAX_DEPTH, "levels")
            else:
                depth -= 1
                if depth < 0:
                    self._ended = True
                    break
        self._depth = depth

    def _look_for_surrogates(self, piece: bytes) -> None:
        window = self._escapes + piece
        self.lone_surrogates = self.lone_surrogates or _LONE.search(window) is not None
        self._escapes = window[-_CONTEXT:]


def check_encoding(start: bytes) -> None:
    """Check that a body with this beginning is UTF-8. Raises Unsupported for UTF-16 and UTF-32."""
    if detect_encoding(start[:4]) not in ("utf-8", "utf-8-sig"):
        raise Unsupported("the body is not UTF-8: JSON has to be")


def _within(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise TooLarge(f"the body has {count} {what} or more; {limit} are allowed (docs/limits.md)")
