"""The settings with which tests and benchmarks start stock vLLM, beside those that they choose themselves."""

from __future__ import annotations

KV_GIB = 1  # of its KV cache
FLAGS = ("--block-size", "32", "--enforce-eager", "--no-async-scheduling")
