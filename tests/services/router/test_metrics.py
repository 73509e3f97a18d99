from prometheus_client import CollectorRegistry, generate_latest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.metrics import GONE_S, MAX_TENANTS, OTHERS, RouterMetrics
from baton.services.router.state import RequestState


def placed(router, prefill, decode):
    prefiller = pb.Worker(worker_id=prefill) if prefill else None
    router.placed(Placement(Attempt("r", 1), prefiller, pb.Worker(worker_id=decode)), 0.001)
    state = RequestState("r", "r", b"", prompt_tokens=3, max_tokens=8, max_model_len=64, deadline=1e9)
    state.timings.placed = state.timings.prefill_began = state.timings.first_token = 1.0
    router.first_token(state, prefill or decode)
    router.admitted(worker_pb2.Admitted(transport="shm"), state, decode)
    router.retried("lost", decode)


def test_series_end_with_their_workers():
    """A series ends some minutes later, unless the worker is known or was just counted."""
    registry = CollectorRegistry()
    now = [1_000.0]
    router = RouterMetrics(registry, clock=lambda: now[0])
    known = ["p0", "d0"]
    router.watch_workers(lambda: known)
    lines = []
    for life in range(50):
        known[:] = [f"p{life}", f"d{life}"]
        placed(router, *known)
        placed(router, "", known[1])
        now[0] += GONE_S
        lines.append(len(generate_latest(registry).splitlines()))
    assert max(lines[5:]) == lines[5]
    text = generate_latest(registry).decode()
    assert 'worker="d49"' in text
    assert 'worker="d30"' not in text
    assert registry.get_sample_value("baton_router_placements_total", {"kind": "pair"}) == 50
    assert registry.get_sample_value("baton_router_placements_total", {"kind": "alone"}) == 50
    now[0] += 10 * GONE_S
    assert 'worker="d49"' in generate_latest(registry).decode()  # idle, but known
    known.clear()
    now[0] += GONE_S + 1
    assert "worker=" not in generate_latest(registry).decode()


def test_series_end_with_their_tenants():
    registry = CollectorRegistry()
    now = [1_000.0]
    router = RouterMetrics(registry, clock=lambda: now[0])
    known = ["acme", "globex"]
    router.tenants.watch(lambda: known)
    for tenant in known:
        router.tenants.entered(tenant)
        router.tenants.refused(tenant, "concurrency")
        router.tenants.used(tenant, 10, 3)
        router.tenants.waiting(tenant, 2)
    router.tenants.entered("")  # keys without tenants
    known.remove("acme")
    now[0] += GONE_S + 1
    text = generate_latest(registry).decode()
    assert 'tenant="acme"' not in text
    assert 'tenant=""' not in text
    labels = {"tenant": "globex"}
    assert registry.get_sample_value("baton_router_tenant_requests_total", labels) == 1
    assert registry.get_sample_value("baton_router_tenant_waiting_requests", labels) == 2
    prompt = registry.get_sample_value("baton_router_tenant_tokens_total", {**labels, "kind": "prompt"})
    assert prompt == 10


def test_a_great_many_tenants_share_series():
    registry = CollectorRegistry()
    router = RouterMetrics(registry)
    for number in range(MAX_TENANTS + 50):
        router.tenants.entered(f"t{number}")
    assert registry.get_sample_value("baton_router_tenant_requests_total", {"tenant": OTHERS}) == 50
    assert generate_latest(registry).decode().count("baton_router_tenant_requests_total{") == MAX_TENANTS + 1


def test_the_rest_of_a_prefills_last_step_is_a_stage_of_its_handoff():
    """The stage lasts from the end of the save until the engine emits the first token."""
    registry = CollectorRegistry()
    router = RouterMetrics(registry)
    state = RequestState("r", "r", b"", prompt_tokens=3, max_tokens=8, max_model_len=64, deadline=1e9)
    state.timings.saved, state.timings.prefill_ended = 1.0, 1.25
    router.admitted(worker_pb2.Admitted(transport="shm", total_ms=300.0), state, "d0")
    labels = {"stage": "sample", "transport": "shm"}
    assert registry.get_sample_value("baton_router_handoff_stage_seconds_sum", labels) == 0.25
