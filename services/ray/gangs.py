"""Orders for the workers of a gang, which shares one reservation of Ray's (services/fleet/places.py)."""

from __future__ import annotations

from dataclasses import replace

from baton.services.fleet.devices import Devices
from baton.services.fleet.node import PartOrder
from baton.services.fleet.places import names_of


def members_of(place: PartOrder) -> list[PartOrder]:
    """Return the orders of a place's workers: the place's own, or one for each worker of its gang.

    They divide the place's GPUs and cores.
    """
    size = place.settings["engine"]["data_parallel_size"]
    if size == 1:
        return [place]
    shares = [each.environment for each in Devices(environment=dict(place.environment)).split(size)]
    return [
        replace(
            place,
            name=name,
            settings={
                **place.settings,
                "worker": {**place.settings["worker"], "gang": place.name, "gang_rank": rank},
            },
            environment=shares[rank],
            cores=max(1, place.cores // size),
        )
        for rank, name in enumerate(names_of(place.name, size))
    ]
