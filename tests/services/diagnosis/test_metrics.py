import asyncio

from prometheus_client import CollectorRegistry, Gauge

from baton import rpc
from baton.metrics import MetricsServer
from baton.protos import scheduler_pb2 as pb
from baton.services.config import load
from baton.services.diagnosis.bundle import gathered
from harness.scheduling import identity
from harness.support import free_port


def serving(name):
    registry = CollectorRegistry()
    Gauge("baton_one", "One", ["of"], registry=registry).labels(name).set(1)
    return MetricsServer(registry, "worker.metrics_port", "127.0.0.1", 0)


def test_those_that_the_scheduler_knows_are_asked():
    """They use free ports, which no setting names. Another machine's loopback address is not asked."""
    with serving("router") as router, serving("worker") as worker:
        here, there = identity("../decode/0", pb.ROLE_DECODE), identity("decode-1", pb.ROLE_DECODE)
        here.host, here.metrics_address = rpc.host_id(), worker.address
        there.host, there.metrics_address = "another", worker.address
        process = pb.Process(id="r1", kind="router", host=rpc.host_id(), metrics_address=router.address)
        workers = [pb.WorkerStatus(identity=one) for one in (here, there)]
        description = pb.Description(workers=workers, processes=[process])
        settings = load({"router": {"port": free_port()}})
        found = asyncio.run(gathered(settings, description))
    assert found.keys() == {"router", "router-r1", "decode-.._decode_0", "decode-decode-1"}
    assert 'baton_one{of="router"} 1.0' in found["router-r1"]
    assert 'baton_one{of="worker"} 1.0' in found["decode-.._decode_0"]
    assert "another machine" in found["decode-decode-1"]
    assert "not reached" in found["router"]


def test_without_a_scheduler_those_of_the_settings_are():
    with serving("router") as router:
        _, _, port = router.address.partition(":")
        worker = {"metrics_port": free_port()}
        found = asyncio.run(gathered(load({"router": {"port": port}, "worker": worker}), None))
    assert 'baton_one{of="router"} 1.0' in found["router"]
    assert "not reached" in found["worker"]
