"""Compile loops to machine code with numba, for the CPU forms of kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from numba import njit  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def compiled(*signatures: str) -> Callable[[F], F]:
    """Compile for these types when the module is imported, so that no request waits for the compiler.

    The machine code is cached next to the source, or in the user's cache folder, and loaded at the next
    start. A function that only compiled functions call needs no signatures: it is compiled into its callers.
    Arguments of other types raise TypeError.
    """

    def compile_now(function: F) -> F:
        try:
            made: F = njit(list(signatures) or None, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError as error:  # numba has no writable cache folder
            logger.info("%s is recompiled at every start: %s", function.__qualname__, error)
            made = njit(list(signatures) or None, nogil=True, error_model="numpy")(function)
        return made

    return compile_now
