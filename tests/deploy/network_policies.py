"""NetworkPolicies as a cluster reads them: which connections a set of them lets through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Doc = dict[str, Any]
Labels = Mapping[str, str]
NAMESPACE_NAME = "kubernetes.io/metadata.name"  # the label that every namespace has


@dataclass(frozen=True)
class Place:
    """A pod, or with an empty namespace something outside the cluster."""

    name: str
    namespace: str = ""
    labels: Labels = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)  # by name


@dataclass(frozen=True, order=True)
class Port:
    """A port of a protocol."""

    number: int
    protocol: str = "TCP"


def matches(selector: Doc, labels: Labels) -> bool:
    """Tell whether a label selector matches; an empty one matches everything."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for one in selector.get("matchExpressions", []):
        key, values = one["key"], one.get("values", [])
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }
        if not holds[one["operator"]]:
            return False
    return True


def lets_in(policies: Iterable[Doc], source: Place, target: Place, port: Port) -> bool:
    """Tell whether the target's side lets the connection through."""
    return _allows(policies, "Ingress", target, source, port, target.ports)


def lets_out(policies: Iterable[Doc], source: Place, target: Place, port: Port) -> bool:
    """Tell whether the source's side lets the connection through."""
    return _allows(policies, "Egress", source, target, port, target.ports)


def about(policies: Iterable[Doc], way: str, place: Place) -> list[Doc]:
    """Return those that say something of a place's connections, `way`: Ingress or Egress."""
    return [one for one in policies if _is_about(one, way, place)]


def edges(policies: Iterable[Doc]) -> Iterator[int]:
    """Yield the port numbers that rules name, and their neighbours."""
    for policy in policies:
        for rule in [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]:
            for one in rule.get("ports", []):
                for number in (one.get("port"), one.get("endPort")):
                    if isinstance(number, int):
                        yield from (number - 1, number, number + 1)


def _allows(
    policies: Iterable[Doc], way: str, own: Place, other: Place, port: Port, names: Mapping[str, int]
) -> bool:
    said = about(policies, way, own)
    if not said:
        return True  # nobody has said anything
    side, peers = ("ingress", "from") if way == "Ingress" else ("egress", "to")
    return any(
        _has_port(rule.get("ports"), port, names) and _has_peer(rule.get(peers), other, own.namespace)
        for policy in said
        for rule in policy["spec"].get(side, [])
    )


def _is_about(policy: Doc, way: str, place: Place) -> bool:
    spec = policy["spec"]
    ways = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    same = policy["metadata"]["namespace"] == place.namespace
    return same and way in ways and matches(spec["podSelector"], place.labels)


def _has_port(allowed: list[Doc] | None, port: Port, names: Mapping[str, int]) -> bool:
    if not allowed:
        return True
    for one in allowed:
        if one.get("protocol", "TCP") != port.protocol:
            continue
        first = one.get("port")
        number = names.get(first, -1) if isinstance(first, str) else first
        if number is None or number <= port.number <= one.get("endPort", number):
            return True
    return False


def _has_peer(allowed: list[Doc] | None, place: Place, own_namespace: str) -> bool:
    if not allowed:
        return True
    for one in allowed:
        if "ipBlock" in one:
            return True  # it may hold anything's address
        if not place.namespace:
            continue
        namespace = one.get("namespaceSelector")
        here = (
            place.namespace == own_namespace
            if namespace is None
            else matches(namespace, {NAMESPACE_NAME: place.namespace})
        )
        if here and matches(one.get("podSelector", {}), place.labels):
            return True
    return False
