"""Orders for the workers of a gang, which share one Ray reservation (services/fleet/places.py)."""

from __future__ import annotations

from dataclasses import replace

from baton.services.config import EngineSettings
from baton.services.fleet.devices import Devices
from baton.services.fleet.node import PartOrder
from baton.services.fleet.places import names_of


def members_of(place: PartOrder, node: int = 0) -> list[PartOrder]:
    """Return the orders of a place's processes on one of its nodes: a worker, or members of its gang.

    They divide the node's GPUs and cores.
    """
    engine = EngineSettings(**place.settings["engine"])
    names = names_of(place.name, engine, node)
    if engine.members == 1:
        return [place]
    shares = Devices(environment=dict(place.environment)).split(len(names))
    first, own = node * len(names), place.settings["worker"]
    return [
        replace(
            place,
            name=name,
            settings={**place.settings, "worker": {**own, "gang": f"{place.name}/{rank}"}},
            environment=share.environment,
            cores=max(1, place.cores // len(names)),
        )
        for rank, (name, share) in enumerate(zip(names, shares, strict=True), first)
    ]
