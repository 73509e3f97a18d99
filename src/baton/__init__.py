"""Baton: prefill and decode on separate workers, with speculative decoding. See README.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.services.offline.pipeline import pipeline

__all__ = ["__version__", "pipeline"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `pipeline` on first use: the processes of a deployment do not need it."""
    if name == "pipeline":
        from baton.services.offline.pipeline import pipeline

        return pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
