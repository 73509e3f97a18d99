"""Server-sent events, parsed by the standard (WHATWG HTML, section 9.2).

They may be split anywhere, even inside a line end, and contain comments, which keep a connection alive.
"""

from __future__ import annotations

import re

MOST_BYTES = 64 << 20  # limit of an event; no answer to a prompt is larger
_LINE_END = re.compile(rb"\r\n|\n|\r")


class Events:
    """Assembles the data of events from the pieces of a stream."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of the next line
        self._data: list[bytes] = []  # data lines of the next event
        self._size = 0  # their bytes
        self._first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes. Raises ValueError for a huge event."""
        *lines, rest = self._split(self._rest + piece)
        self._rest = rest
        found = [data for line in lines if (data := self._line(line)) is not None]
        if len(rest) + self._size > MOST_BYTES:
            raise ValueError(f"an event of the stream is larger than {MOST_BYTES >> 20} MiB")
        return found

    def _split(self, text: bytes) -> list[bytes]:
        if text.endswith(b"\r"):  # its line feed may still follow
            *lines, rest = _LINE_END.split(text[:-1])
            return [*lines, rest + b"\r"]
        return _LINE_END.split(text)

    def _line(self, line: bytes) -> bytes | None:
        """Process a whole line; return an event's data when it ends."""
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            data, self._data, self._size = b"\n".join(self._data), [], 0
            return data or None
        field, _, value = line.partition(b":")
        if field == b"data":  # comments have an empty name; other fields are ignored
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
        return None
