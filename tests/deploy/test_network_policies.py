"""The network policies allow the connections in docs/clusters.md, and nothing else."""

import copy
import re

import pytest

from tests.deploy import test_ray_service
from tests.deploy.manifests import PAGE, WORKERS, Manifests, rendered
from tests.deploy.network_policies import DNS, PROMETHEUS, STRANGERS, Port, differences, dns

OVERLAYS = ("cpu", "gpu")
# The table in docs/clusters.md: from, to, and the setting with the port.
DIALS = [
    ("client", "router", "router.port"),
    ("router", "scheduler", "scheduler.address"),
    ("router", "worker", "worker.listen"),
    ("worker", "scheduler", "scheduler.address"),
    ("scheduler", "worker", "worker.listen"),
    ("worker", "worker", "handoff.listen"),
    ("worker", "worker", "worker.listen"),
    ("scheduler", "ca", "security.join"),
    ("router", "ca", "security.join"),
    ("worker", "ca", "security.join"),
    ("ca", "scheduler", "scheduler.address"),
    ("scheduler", "redis", "scheduler.store"),
    ("router", "redis", "router.keys_store"),
    ("prometheus", "router", "router.port"),
    ("prometheus", "router", "router.metrics_port"),
    ("prometheus", "scheduler", "scheduler.metrics_port"),
    ("prometheus", "worker", "worker.metrics_port"),
]


@pytest.fixture(params=OVERLAYS)
def manifests(request):
    return rendered(request.param)


def network(manifests, more=set):
    """Compare the policies with DIALS. `more` derives further needed connections from those."""
    own = [one.place for one in manifests.workloads]
    others = [DNS, PROMETHEUS, *STRANGERS]
    by_kind = {"client": [one.name for one in [*own, *others]], "prometheus": [PROMETHEUS.name]}
    for one in manifests.workloads:
        by_kind.setdefault(one.kind, []).append(one.name)
    needed = dns(one.place for one in manifests.ours) | {
        (source, target, Port(number))
        for dialler, dialled, setting in DIALS
        for source in by_kind[dialler]
        for target in by_kind[dialled]
        for number in manifests.workload(target).ports_of(setting)
    }
    # Our own pods are not clients.
    no_clients = {(name, "router") for name in ("ca", "scheduler", "router", "redis", *WORKERS)}
    return differences(manifests.of("NetworkPolicy"), own, others, needed | more(needed), no_clients)


def test_policies_allow_exactly_the_table(manifests):
    assert not network(manifests)


def policy(documents, name):
    (found,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", name)]
    return found["spec"]


# fmt: off
EDITS = [
    (lambda d: policy(d, "router")["egress"].pop(1), "router must be let out to decode at 7401/TCP"),
    (lambda d: policy(d, "worker")["egress"][1]["ports"][0].pop("endPort"),
     "prefill must be let out to decode at 7403/TCP"),
    (lambda d: policy(d, "redis")["ingress"][0].pop("ports"), "redis must not let scheduler in at 22/TCP"),
    (lambda d: policy(d, "redis")["ingress"][0].pop("from"), "redis must not let decode in at 6379/TCP"),
    (lambda d: policy(d, "worker")["ingress"][0]["from"].append({"namespaceSelector": {}}),
     "decode must not let another namespace in at 7401/TCP"),
    (lambda d: policy(d, "scheduler")["ingress"][0]["from"].append({"ipBlock": {"cidr": "::/0"}}),
     "scheduler must not let something outside in at 7400/TCP"),
    (lambda d: policy(d, "nothing-else").update(policyTypes=["Ingress"]),
     "redis must not be let out to decode at 22/TCP"),
]
# fmt: on


@pytest.mark.parametrize(("edit", "said"), EDITS, ids=[said for _, said in EDITS])
def test_a_wrong_policy_is_found(edit, said):
    documents = copy.deepcopy(rendered("gpu").documents)
    edit(documents)
    assert said in network(Manifests(documents))


def test_the_page_has_the_table():
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \| `([\w.-]+)` \|", PAGE.read_text(), re.MULTILINE)
    expected = []
    for source, target, setting in DIALS:
        workload = rendered("cpu").workload("prefill" if target == "worker" else target)
        expected.append((source, target, str(workload.ports_of(setting)[0]), setting))
    expected += [(source, target, str(port), key) for source, target, port, key in test_ray_service.DIALS]
    assert rows == expected
