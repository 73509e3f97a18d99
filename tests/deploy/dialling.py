"""The table of who dials whom, and a check that the policies let exactly that through."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tests.deploy.manifests import COMPONENT, NAMESPACE, WORKERS, Manifests, port_of
from tests.deploy.network_policies import Doc, Place, Port, about, edges, lets_in, lets_out


@dataclass(frozen=True)
class Dial:
    """A row of the table in docs/clusters.md: source, target, and the setting that names the port."""

    source: str
    target: str
    setting: str


NEEDED = [
    Dial("client", "router", "router.port"),
    Dial("router", "scheduler", "scheduler.address"),
    Dial("router", "worker", "worker.listen"),
    Dial("worker", "scheduler", "scheduler.address"),
    Dial("scheduler", "worker", "worker.listen"),
    Dial("worker", "worker", "handoff.port"),
    Dial("worker", "worker", "worker.listen"),
    Dial("scheduler", "ca", "security.join"),
    Dial("router", "ca", "security.join"),
    Dial("worker", "ca", "security.join"),
    Dial("ca", "scheduler", "scheduler.address"),
    Dial("scheduler", "redis", "scheduler.store"),
    Dial("router", "redis", "router.keys_store"),
    Dial("prometheus", "router", "router.port"),
    Dial("prometheus", "router", "router.metrics_port"),
    Dial("prometheus", "scheduler", "scheduler.metrics_port"),
    Dial("prometheus", "worker", "worker.metrics_port"),
]
DNS = Place("dns", "kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = Place("prometheus", "monitoring")
STRANGERS = [  # each may be a client
    Place("something outside"),
    Place("a pod of another namespace", "default", {COMPONENT: "router", "baton/engine": "worker"}),
    Place("another pod of the namespace", NAMESPACE),
    Place("another pod of kube-system", "kube-system"),
]


def network(manifests: Manifests) -> Iterator[str]:
    """Every connection to and from our pods, over all ports at which a policy could say something else."""
    own = [one.place for one in manifests.workloads]
    others = [DNS, PROMETHEUS, *STRANGERS]
    needed = set(_needed(manifests, [*own, *others]))
    # A client may be one of our pods, but none is.
    yield from differences(manifests.of("NetworkPolicy"), own, others, needed, _CLIENTS)


def differences(
    policies: list[Doc],
    own: list[Place],
    others: list[Place],
    needed: set[tuple[str, str, Port]],
    not_out: Collection[tuple[str, str]] = (),
) -> Iterator[str]:
    """Yield the connections between our places and others that policies do not treat as they are needed.

    `needed`: (from, to, port). `not_out`: pairs of ours of which the first does not dial,
    though the second lets everybody in.
    """
    numbers = {*edges(policies), *(port.number for _, _, port in needed), *ANY}
    ours = [(one, about(policies, "Ingress", one), about(policies, "Egress", one)) for one in own]
    for number in sorted(numbers):
        for port in (Port(number), Port(number, "UDP")):
            for one, inwards, outwards in ours:
                for other in [*own, *others]:
                    wanted = (other.name, one.name, port) in needed
                    if lets_in(inwards, other, one, port) != wanted:
                        yield f"{one.name} {_must(wanted)} let {other.name} in at {_text(port)}"
                    wanted = (one.name, other.name, port) in needed and (one.name, other.name) not in not_out
                    if lets_out(outwards, one, other, port) != wanted:
                        yield f"{one.name} {_must(wanted)} be let out to {other.name} at {_text(port)}"


ANY = (22, 443, 65535)  # ports of nobody's
_CLIENTS = {(name, "router") for name in ("ca", "scheduler", "router", "redis", *WORKERS)}


def _needed(manifests: Manifests, places: list[Place]) -> Iterator[tuple[str, str, Port]]:
    by_kind: dict[str, list[str]] = {"client": [one.name for one in places], "prometheus": [PROMETHEUS.name]}
    for one in manifests.workloads:
        by_kind.setdefault(one.kind, []).append(one.name)
    for dial in NEEDED:
        for source in by_kind[dial.source]:
            for target in by_kind[dial.target]:
                for number in port_of(manifests, target, dial.setting):
                    yield source, target, Port(number)
    for one in manifests.ours:
        for protocol in ("UDP", "TCP"):
            yield one.name, DNS.name, Port(53, protocol)


def _must(wanted: bool) -> str:
    return "must" if wanted else "must not"


def _text(port: Port) -> str:
    return f"{port.number}/{port.protocol}"
