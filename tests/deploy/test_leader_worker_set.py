"""The overlay lws: a gang in each group, whose pods know their rank and reach each other on any port.

test_kubernetes.py also tests these pods.
"""

import pytest

from baton.services import roles
from baton.services.worker.gang import gang_of, is_limb
from tests.deploy.manifests import WORKERS, rendered
from tests.deploy.network_policies import UNUSED_PORTS, Port, edges
from tests.deploy.test_network_policies import network


@pytest.fixture
def manifests():
    return rendered("lws")


def test_a_group_is_a_gang_that_ends_as_one(manifests):
    sets = manifests.of("LeaderWorkerSet")
    assert {one["metadata"]["name"] for one in sets} == set(WORKERS) - {"encode"}
    for one in sets:
        spec, worker = one["spec"], manifests.workload(one["metadata"]["name"])
        group, engine = spec["leaderWorkerTemplate"], worker.settings.engine
        assert engine.members == engine.nodes == group["size"]
        assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
        # With LeaderReady no other pod would come, without which rank 0 never is ready.
        assert spec["startupPolicy"] == "LeaderCreated"
        assert "leaderTemplate" not in group
        gang = gang_of(worker.settings)
        assert (gang.name, gang.rank, gang.size) == ("0f3a", 1, group["size"])
        assert not is_limb(worker.settings)  # a limb would not answer its probes
        roles.check(roles.role(worker.name), worker.settings)


def test_only_members_reach_each_other_on_any_port(manifests):
    def any_port(needed):
        listed = (port.number for _, _, port in needed)
        numbers = {*edges(manifests.of("NetworkPolicy")), *UNUSED_PORTS, *listed}
        ports = [Port(number, protocol) for number in numbers for protocol in ("TCP", "UDP")]
        return {(source, target, port) for source in WORKERS for target in WORKERS for port in ports}

    assert not network(manifests, any_port)
    assert "decode must not let prefill in at 22/TCP" in network(manifests)
