"""Compute names of workers and nodes of routers, without calling Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from baton.services.ray.cluster import Machine


def new_names(role: str, taken: Collection[str], number: int) -> list[str]:
    """Return `number` unused worker names, the lowest first: prefill-0, prefill-1."""
    candidates = (f"{role}-{at}" for at in range(len(taken) + number))
    return [name for name in candidates if name not in taken][:number]


def place_routers(
    there: Mapping[str, str], machines: Mapping[str, Machine], home: str, number: int
) -> dict[str, str]:
    """Return each router's node: its current one if that is alive, else one without a router, `home` first.

    All routers use one port, so a node has at most one. Routers without a node are left out.
    """
    placed = {name: node for name, node in there.items() if node in machines}
    free = [node for node in machines if node not in placed.values()]
    free.sort(key=lambda node: (node != home, machines[node].name, node))
    missing = [name for at in range(number) if (name := f"router-{at}") not in placed]
    return placed | dict(zip(missing, free, strict=False))
