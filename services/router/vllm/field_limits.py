"""Limit fields that cost the router's loop more than their size suggests.

vLLM limits the number of bad words and stop strings, but not their length. Bad words are tokenized twice
each: 10 of 60 KB took 0.4 s, 100 of them 2.5 s. Stop strings are searched for at each token, and sent to each
worker. The texts of /generative_scoring are tokenized in the loop: 2.6 MB took 2.5 s. Each tool of
/v1/responses is dumped separately, which takes 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Characters of all texts in a field; 16,384 take 20 ms to tokenize.
MAX_CHARACTERS: Mapping[str, int] = {
    "bad_words": 16 << 10,
    "stop": 16 << 10,
    "stop_sequences": 16 << 10,
    "query": 64 << 10,
    "items": 64 << 10,
    **dict.fromkeys(
        ("request_id", "user", "cache_salt", "prompt_cache_key"), 4 << 10
    ),  # sent along to workers
}
MAX_TOOLS = 512  # OpenAI's own limit is 128


def field_problem(request: Any) -> str:
    """Return why a request's fields are refused, or ""."""
    for name, allowed in MAX_CHARACTERS.items():
        size = sum(map(len, _texts(getattr(request, name, None))))
        if size > allowed:
            return f"{name} has {size} characters; {allowed} are allowed (docs/limits.md)"
    tools = getattr(request, "tools", None)
    if tools and len(tools) > MAX_TOOLS:
        return f"tools has {len(tools)} entries; {MAX_TOOLS} are allowed (docs/limits.md)"
    return ""


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return (value,)
    return (one for one in value if isinstance(one, str)) if isinstance(value, list) else ()
