from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.protos import scheduler_pb2 as pb
from baton.services.router.vllm.metrics import EngineMetrics, ModelWorkers


def worker(worker_id, method="", **load):
    capacity = pb.Capacity(block_size=32, num_blocks=101, speculative_method=method)
    identity = pb.WorkerIdentity(worker_id=worker_id, capacity=capacity)
    return pb.WorkerStatus(identity=identity, load=pb.WorkerLoad(**load))


def shown(*workers):
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.watch(ModelWorkers(lambda: workers, "tiny", caching=True))
    found = {}
    with metrics:
        text = generate_latest(registry).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            found[sample.name, labels.pop("engine"), tuple(labels.values())] = sample.value
    return found


def test_each_worker_has_its_series():
    counts = pb.EngineCounts(prefix_queries=900, prefix_hits=64, external_queries=80, external_hits=40)
    plain = worker("p.1", running=2, waiting=5, deferred=3, free_blocks=75, counts=counts)
    drafts = pb.EngineCounts(drafts=10, drafted_tokens=25, accepted_by_position=[8, 3])
    drafting = worker("d.2", "mtp", running=7, free_blocks=100, counts=drafts)
    series = shown(plain, drafting)
    assert {key[0::2]: value for key, value in series.items() if key[1] == "p.1"} == {
        ("vllm:num_requests_running", ()): 2,
        ("vllm:num_requests_waiting", ()): 5,
        ("vllm:num_requests_waiting_by_reason", ("capacity",)): 2,
        ("vllm:num_requests_waiting_by_reason", ("deferred",)): 3,
        ("vllm:kv_cache_usage_perc", ()): 0.25,  # out of 100 blocks: vLLM keeps one for itself
        ("vllm:prefix_cache_queries_total", ()): 900,
        ("vllm:prefix_cache_hits_total", ()): 64,
        ("vllm:external_prefix_cache_queries_total", ()): 80,
        ("vllm:external_prefix_cache_hits_total", ()): 40,
        ("vllm:prompt_tokens_cached_by_source_total", ("device",)): 64,
        ("vllm:prompt_tokens_cached_by_source_total", ("p2p",)): 40,
        ("vllm:cache_config_info", ("32", "True", "101")): 1,  # sorted by the labels' names
    }
    assert series["vllm:num_requests_running", "d.2", ()] == 7
    assert series["vllm:kv_cache_usage_perc", "d.2", ()] == 0
    assert {key[0::2]: value for key, value in series.items() if "spec_decode" in key[0]} == {
        ("vllm:spec_decode_num_drafts_total", ()): 10,
        ("vllm:spec_decode_num_draft_tokens_total", ()): 25,
        ("vllm:spec_decode_num_accepted_tokens_total", ()): 11,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", ("0",)): 8,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", ("1",)): 3,
    }


def test_a_worker_that_has_just_loaded_is_not_full():
    """Its last heartbeat was sent before it had loaded, without KV blocks."""
    assert not [key for key in shown(worker("new")) if "kv_cache_usage" in key[0]]
    assert shown(worker("full", running=1))["vllm:kv_cache_usage_perc", "full", ()] == 1


def test_a_worker_whose_engine_is_loading_has_no_series():
    loading = worker("new", running=0)
    loading.identity.ClearField("capacity")
    silent = worker("unheard")
    silent.ClearField("load")
    assert shown(loading, silent) == {}
