"""Evaluate NetworkPolicies as a cluster does, and compare them with the connections needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NAMESPACE_NAME = "kubernetes.io/metadata.name"  # a label that Kubernetes gives every namespace
UNUSED_PORTS = (22, 443, 65535)


@dataclass(frozen=True)
class Place:
    """A pod, or something outside the cluster if it has no namespace."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)  # port by name


@dataclass(frozen=True)
class Port:
    number: int
    protocol: str = "TCP"

    def __str__(self):
        return f"{self.number}/{self.protocol}"


DNS = Place("dns", "kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = Place("prometheus", "monitoring")
STRANGERS = [  # possible clients
    Place("something outside"),
    Place("another namespace", "default", {"baton/engine": "worker"}),
    Place("another pod of the namespace", "baton"),
    Place("another pod of kube-system", "kube-system"),
]


def matches(selector, labels):
    """Return whether a label selector matches; an empty one always does."""
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
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def dns(own):
    """Return the connections for name look-ups."""
    return {(one.name, DNS.name, Port(53, protocol)) for one in own for protocol in ("UDP", "TCP")}


def differences(policies, own, others, needed, not_out=()):
    """Return the needed connections that are refused, and the unneeded ones that are allowed.

    `needed`: (from, to, port). `not_out`: pairs (from, to) of our pods that never connect, although the
    second one accepts everybody. All ports at the limits of rules are tried.
    """
    found = []
    numbers = {*edges(policies), *(port.number for _, _, port in needed), *UNUSED_PORTS}
    ours = [(one, *(_about(policies, way, one) for way in ("Ingress", "Egress"))) for one in own]
    for port in (Port(number, protocol) for number in sorted(numbers) for protocol in ("TCP", "UDP")):
        for one, inwards, outwards in ours:
            for other in [*own, *others]:
                wanted = (other.name, one.name, port) in needed
                if _allows(inwards, ("ingress", "from"), one, other, port, one.ports) != wanted:
                    found.append(f"{one.name} {_must(wanted)} let {other.name} in at {port}")
                wanted = (one.name, other.name, port) in needed and (one.name, other.name) not in not_out
                if _allows(outwards, ("egress", "to"), one, other, port, other.ports) != wanted:
                    found.append(f"{one.name} {_must(wanted)} be let out to {other.name} at {port}")
    return found


def _must(wanted):
    return "must" if wanted else "must not"


def edges(policies):
    """Yield the ports in rules, and their neighbours."""
    for policy in policies:
        for rule in [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]:
            for number in (one.get(key) for one in rule.get("ports", []) for key in ("port", "endPort")):
                if isinstance(number, int):
                    yield from (number - 1, number, number + 1)


def _about(policies, way, place):
    """Return the policies for a pod in one direction, Ingress or Egress."""

    def ways(spec):
        return spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]

    return [
        one
        for one in policies
        if one["metadata"]["namespace"] == place.namespace
        and way in ways(one["spec"])
        and matches(one["spec"]["podSelector"], place.labels)
    ]


def _allows(policies, side, own, other, port, names):
    rules, peers = side
    return not policies or any(
        _has_port(rule.get("ports"), port, names) and _has_peer(rule.get(peers), other, own.namespace)
        for policy in policies
        for rule in policy["spec"].get(rules, [])
    )


def _has_port(allowed, port, names):
    for one in allowed or ():
        first = one.get("port")
        number = names.get(first, -1) if isinstance(first, str) else first
        if one.get("protocol", "TCP") == port.protocol and (
            number is None or number <= port.number <= one.get("endPort", number)
        ):
            return True
    return not allowed


def _has_peer(allowed, place, own_namespace):
    for one in allowed or ():
        if "ipBlock" in one:  # it may contain any address
            return True
        selector = one.get("namespaceSelector", {"matchLabels": {NAMESPACE_NAME: own_namespace}})
        if (
            place.namespace
            and matches(selector, {NAMESPACE_NAME: place.namespace})
            and matches(one.get("podSelector", {}), place.labels)
        ):
            return True
    return not allowed
