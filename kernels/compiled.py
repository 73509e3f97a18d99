"""Loops over tokens as machine code, by numba: what the CPU paths of kernels are written with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from numba import njit  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def compiled(*signatures: str) -> Callable[[F], F]:
    """Compile for these types when the module is imported, so that no request waits for it.

    What came out is kept beside the source, or in the user's cache: the next start loads it. Without
    signatures, for functions that others call: they are compiled into their callers. Other types than those
    named are a TypeError.
    """

    def compile_now(function: F) -> F:
        try:
            made: F = njit(list(signatures) or None, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError as error:  # numba found no folder that it may write to
            logger.info("%s is compiled anew in every start: %s", function.__qualname__, error)
            made = njit(list(signatures) or None, nogil=True, error_model="numpy")(function)
        return made

    return compile_now
