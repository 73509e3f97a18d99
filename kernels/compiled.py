"""Compile loops to machine code with numba, for the CPU forms of kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from numba import njit  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def compiled(*signatures: str) -> Callable[[F], F]:
    """Compile for these types when the module is imported, so that no request waits for it.

    The machine code is cached beside the source, or in the user's cache: the next start loads it. Functions
    called only by compiled functions take no signatures: they are compiled into their callers. Arguments of
    other types raise TypeError.
    """

    def compile_now(function: F) -> F:
        try:
            made: F = njit(list(signatures) or None, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError as error:  # numba found no folder that it may write to
            logger.info("%s is compiled anew at every start: %s", function.__qualname__, error)
            made = njit(list(signatures) or None, nogil=True, error_model="numpy")(function)
        return made

    return compile_now
