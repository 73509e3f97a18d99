"""Imports of the server from which the bench's engines are forked, so that each starts in seconds."""

from __future__ import annotations

from baton.services.worker import lifecycle

lifecycle.preload()
