"""Prompts of many lengths: token ids of real text."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import textwrap
from functools import cache

from transformers import AutoTokenizer

from harness.deployment import MODEL

# Many lengths around multiples of the block size, 32 tokens.
# fmt: off
LENGTHS = [
    1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 20, 23, 27, 30, 31, 32, 33, 34, 40, 47, 48, 55, 62, 63, 64, 65,
    66, 72, 80, 90, 95, 96, 97, 110, 127, 128, 129, 140, 159, 160, 161, 180, 200, 223, 224, 225, 255,
    256, 257, 300, 320, 350, 383, 384, 385, 420, 480, 511, 512, 513, 600, 640, 700, 767, 768, 769, 850,
    899, 900,
]
# fmt: on


@cache
def _tokens(module: str) -> list[int]:
    source = {"argparse": argparse, "subprocess": subprocess, "textwrap": textwrap}[module]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids: list[int] = tokenizer.encode(inspect.getsource(source)[:60_000])
    return ids


def prompts() -> list[list[int]]:
    """Return a prompt of each length. Every third shares a prefix with others, to hit the prefix cache."""
    found = []
    for number, length in enumerate(LENGTHS):
        if number % 3 == 0:
            found.append(_tokens("argparse")[:length])
        else:
            start = 37 * number
            found.append(_tokens("subprocess")[start : start + length])
    return found
