"""Limits on the texts of a request's fields that cost more than their bytes: bad words and stop strings.

vLLM bounds their number. Bad words are tokenized twice each, in the router's loop: 100 of 60 KB took 12 s.
Stop strings are looked for at each token, and travel with the request to each worker.
"""

from __future__ import annotations

from typing import Any

MAX_WORDS = 16 << 10  # characters of each field; 16,384 of bad words take 20 ms


def words_problem(request: Any) -> str:
    """Return why a request's words are refused; empty if they are not."""
    for name in ("bad_words", "stop", "stop_sequences"):
        words = getattr(request, name, None)
        size = sum(map(len, (words,) if isinstance(words, str) else words or ()))
        if size > MAX_WORDS:
            return f"{name} has {size} characters; {MAX_WORDS} are allowed"
    return ""
