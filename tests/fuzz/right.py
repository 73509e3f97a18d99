"""Valid requests, which tests change."""

from __future__ import annotations

from typing import Any

# A valid body for each path. Generated fields are added to it, because a wholly generated body would nearly
# always fail at its first wrong field. `max_tokens` keeps answers short.
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Hi"}]], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 73]},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5, 6]},
    "/invocations": {"prompt": "Hi", "max_tokens": 2},
}
