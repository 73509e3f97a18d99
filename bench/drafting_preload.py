"""Imported once by the server that the bench's engines are forked from: each of them starts in seconds."""

from __future__ import annotations

from baton.services.worker import lifecycle

lifecycle.preload()
