"""Run a deployment on Ray from its configuration."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.services.ray import cluster
from baton.services.ray.config import ClusterSettings, read
from baton.services.ray.deployment import Deployment, Tell


@contextmanager
def deploy(
    config: str | Path | Mapping[str, Any] | ClusterSettings,
    *,
    address: str = cluster.LOCAL,
    log_dir: str = "",
    tell: Tell | None = None,
    stop: threading.Event | None = None,
) -> Iterator[Deployment]:
    """Run a deployment on a Ray cluster for the length of the block, which begins when every part is ready.

        with deploy("cluster.yaml", address="auto") as deployment:
            print(deployment.urls)
            deployment.scale(prefill=2)

    `config`: cluster.yaml, or its content. `address`: "local" for a new cluster on this machine, "auto" for
    the one running here, or host:port; ignored if this process is already connected. `log_dir`: a folder
    for each node's logs, a temporary one by default. `tell` is called with a part's name and an event, from
    several threads. `stop` ends the wait for readiness when it is set.

    Raises ConfigError or StartError, and leaves nothing running.
    """
    settings = config if isinstance(config, ClusterSettings) else read(config)
    ours = cluster.connect(address)
    try:
        # Nothing outside this machine needs to reach a cluster made for this process.
        loopback = ours and address == cluster.LOCAL
        with Deployment(settings, loopback=loopback, log_dir=log_dir, tell=tell) as deployment:
            if tell and settings.unused:
                tell("settings", f"ignored: Baton scales by its section slo: {', '.join(settings.unused)}")
            deployment.wait_ready(stop=stop)
            yield deployment
    finally:
        if ours:
            cluster.disconnect()
