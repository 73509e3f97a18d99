"""The API for Ray clusters (docs/ray.md). Importing it does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.services.ray.deploy import deploy
from baton.services.ray.deployment import Deployment
from baton.services.ray.desk import Remote

__all__ = ["Deployment", "Remote", "build_pd_openai_app", "deploy"]


def build_pd_openai_app(args: Mapping[str, Any]) -> Any:
    """Return an application for Ray Serve; see baton.services.ray.serve. Needs `ray[serve]`."""
    from baton.services.ray.serve import build_pd_openai_app as build

    return build(args)
