"""Baton: prefill and decode on separate workers, with speculative decoding. See README.md."""

__version__ = "0.1.0"
