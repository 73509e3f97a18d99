"""The settings with which tests and benchmarks start stock vLLM, beside those that they choose themselves."""

from __future__ import annotations

KV_GIB = 1  # of its KV cache
FLAGS = ("--block-size", "32", "--enforce-eager", "--no-async-scheduling")


def told() -> str:
    """Return this in words, for a page that compares with it."""
    words = " ".join(FLAGS).replace(" --", "`, `--")
    return f"(`{words}`, {KV_GIB} GiB of KV cache)"
