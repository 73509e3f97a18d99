import pytest

from baton.services.config import Settings, load
from baton.services.errors import ConfigError
from baton.services.ray.config import ClusterSettings, read
from baton.services.ray.sections import SERVES_OWN, Autoscaling
from harness.deployment import MODEL
from harness.support import PYTHON, ROOT, ran

WEIGHTS = str(MODEL)


def workers(**more):
    return {"model_loading_config": {"model_id": "demo", "model_source": WEIGHTS}, **more}


def cluster(prefill=None, **sections):
    return {"prefill_config": workers(**(prefill or {})), "decode_config": workers(), **sections}


def test_engine_kwargs_lie_over_the_engine_section_of_each_side():
    kwargs = {"max_num_seqs": 4, "gpu_memory_utilization": 0.5, "kv_transfer_config": {"kv_role": "kv_both"}}
    settings = read(cluster({"engine_kwargs": kwargs}, engine={"max_num_seqs": 8, "kv_cache_gib": 0.5}))
    prefill, decode = settings.engine_of("prefill"), settings.engine_of("decode")
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (4, 8)
    assert (prefill.kv_cache_gib, prefill.model, prefill.served_model_name) == (0.5, WEIGHTS, ["demo"])
    # vLLM gets its own arguments, without the one that Ray's users must give and Baton sets itself.
    assert prefill.extra == {"gpu_memory_utilization": 0.5}
    assert decode.extra == {}


def test_the_shape_of_an_engine_by_vllms_names():
    """The kwargs of Ray's guides for large models. Baton chooses what runs the ranks."""
    drafts = {"method": "deepseek_mtp", "num_speculative_tokens": 1}
    kwargs = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 4,
        "enable_expert_parallel": True,
        "speculative_config": drafts,
        "distributed_executor_backend": "ray",
        "data_parallel_backend": "ray",
    }
    engine = load(cluster({"engine_kwargs": kwargs}), None, ClusterSettings).engine_of("prefill")
    assert (engine.ranks, engine.data_parallel_size, engine.expert_parallel) == (2, 4, True)
    assert (engine.speculative_config.method, engine.speculative_config.limit) == ("deepseek_mtp", 1)
    assert engine.extra == {}


def test_encode_workers_are_there_if_they_are_configured():
    """They have the prefill workers' engine, on one rank."""
    one = str(MODEL)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    tree = {"engine": {"model": one, "tensor_parallel_size": 2, "speculative_config": drafts}}
    assert read(tree).deploying("encode").initial == 0
    settings = read(tree | {"encode_config": {"engine_kwargs": {"max_num_seqs": 2}}})
    engine = settings.engine_of("encode")
    assert (engine.model, engine.ranks, engine.max_num_seqs, engine.speculative_config) == (one, 1, 2, None)
    assert (settings.deploying("encode").initial, settings.bounds("encode")) == (1, (0, None))
    assert sum(settings.bundle("encode").values()) == 1


HALF = {"placement_group_config": {"bundle_per_worker": {"CPU": 1, "GPU": 0.5}}}


def test_workers_may_share_a_gpu_if_they_say_how_much_of_it():
    assert read(cluster(HALF, engine={"kv_cache_gib": 8})).bundle("prefill")["GPU"] == 0.5


def test_parts_speak_tls_unless_told_otherwise():
    assert read(cluster()).security.tls
    assert read(cluster(security={"ca": "elsewhere"})).security.tls
    assert not read(cluster(security={"insecure": True})).security.tls


def test_a_parts_tree_is_batons_own_with_its_secrets():
    store = "redis://:secret@127.0.0.1:6379/0"
    settings = read(cluster(scheduler={"store": store}, router={"api_key": "hidden"}))
    own = Settings(**settings.tree_of("prefill"))
    assert (own.scheduler.store, own.router.api_key.get_secret_value()) == (store, "hidden")
    assert own.engine == settings.engine_of("prefill")
    assert "hidden" not in repr(settings)


@pytest.mark.parametrize(
    ("group", "bundle"),
    [
        ({"placement_group_config": {"bundles": [{"CPU": 2}]}}, {"CPU": 2.0}),
        # Ray reserves a bundle for each rank; here they are added up, as the worker runs on one node.
        (
            {
                "engine_kwargs": {"tensor_parallel_size": 2},
                "placement_group_config": {"bundles": [{"CPU": 1, "GPU": 1}, {"GPU": 1}]},
            },
            {"CPU": 1.0, "GPU": 2.0},
        ),
        (
            {
                "engine_kwargs": {"tensor_parallel_size": 4},
                "placement_group_config": {"bundle_per_worker": {"CPU": 2, "GPU": 1}},
                "accelerator_type": "H100",
            },
            {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 0.001},
        ),
    ],
)
def test_what_a_worker_reserves(group, bundle):
    assert read(cluster(group)).bundle("prefill") == bundle


@pytest.mark.parametrize(("on_cpu", "bundle"), [(True, {"CPU": 2.0}), (False, {"CPU": 1.0, "GPU": 2.0})])
def test_what_a_worker_reserves_unasked(on_cpu, bundle, monkeypatch):
    """A core or a GPU for each rank, depending on the installed vLLM, which the test replaces."""
    monkeypatch.setattr("baton.services.ray.config.cpu_build", lambda: on_cpu)
    assert read(cluster({"engine_kwargs": {"tensor_parallel_size": 2}})).bundle("prefill") == bundle
    gang = {"tensor_parallel_size": 2, "data_parallel_size": 4, "speculative_config": None}
    four = {name: 4 * amount for name, amount in bundle.items()}
    assert read(cluster({"engine_kwargs": gang})).bundle("prefill") == four
    # Over two nodes, on each: a part of the ranks.
    plain = {"security": {"plain_ranks": True}}
    half = {name: 2 * amount for name, amount in bundle.items()}
    assert read(cluster({"engine_kwargs": gang | {"nodes": 2}}, **plain)).bundle("prefill") == half
    wide = {"engine_kwargs": {"tensor_parallel_size": 4, "nodes": 2}}
    assert read(cluster(wide, **plain)).bundle("prefill") == bundle


@pytest.mark.parametrize(
    ("deployment_config", "initial", "refused"),
    [
        ({}, 1, []),
        ({"num_replicas": 3}, 3, []),
        ({"autoscaling_config": {"min_replicas": 2, "max_replicas": 4}}, 2, [0, 1, 5]),
        ({"autoscaling_config": {"initial_replicas": 2}}, 2, [0]),
    ],
)
def test_numbers_and_their_bounds(deployment_config, initial, refused):
    settings = read(cluster({"deployment_config": deployment_config}))
    least, most = settings.bounds("prefill")
    assert settings.deploying("prefill").initial == initial
    assert [number for number in range(6) if not least <= number <= (most or number)] == refused


def limits(least=None, most=None, **more):
    numbers = {"min_replicas": least, "max_replicas": most}
    given = {key: number for key, number in numbers.items() if number is not None}
    return {"deployment_config": {"autoscaling_config": {**given, **more}}}


FIXED = {"deployment_config": {"num_replicas": 2}}


def scaled(prefill, decode, mode="on", **more):
    sides = {"prefill_config": workers(**prefill), "decode_config": workers(**decode)}
    return {**sides, "autoscale": {"mode": mode, **more.pop("autoscale", {})}, **more}


def kwargs(**given):
    return cluster({"engine_kwargs": given})


ANY, TWO_GPUS = limits(), "prefill_config.placement_group_config: 1 GPUs, but a worker has 2 ranks"
ONE_GPU = {"placement_group_config": {"bundles": [{"GPU": 1}]}}
SCALING = "prefill_config.deployment_config.autoscaling_config"
# What is given, and the parts of its error.
REFUSED = [
    (cluster(models={"a": {}}), "models: a deployment on Ray serves one model"),
    (cluster(fleet={"devices": [0, 0]}), "fleet.devices: on Ray | GPU: 0.5"),
    (cluster(fleet={"engines": {"decode": {"nodes": 2}}}), "fleet.engines|decode_config.engine_kwargs"),
    (cluster(fleet={"node_rank": 1}), "fleet.node_rank|Ray chooses"),
    (cluster(HALF), "prefill_config|: with 0.5 GPUs |kv_cache_gib"),
    (cluster(HALF | {"engine_kwargs": {"tensor_parallel_size": 2}}, engine={"kv_cache_gib": 8}),
     f"{TWO_GPUS} (engine.tensor_p"),
    (cluster({"engine_kwargs": {"data_parallel_size": 2}, **ONE_GPU}), f"{TWO_GPUS}|data_parallel_size"),
    (scaled({"engine_kwargs": {"data_parallel_size": 2}, **ANY}, ANY),
     "data_parallel_size or engine.nodes is above 1|gangs on Ray are neither|autoscale.mode"),
    (kwargs(data_parallel_size_local=2), "engine.extra.data_parallel_size_local|leave it out"),
    (kwargs(data_parallel_rank=2), "engine.extra.data_parallel_rank|leave it out"),
    (kwargs(prefill_context_parallel_size=2), "engine.extra.prefill_context_parallel_size|is not served"),
    (kwargs(data_parallel_size=2, speculative_config={"method": "mtp"}),
     "num_speculative_tokens|the engines of a gang|set it"),
    (kwargs(tensor_parallel_size=2, nodes=2), "engine.nodes is 2|set security.plain_ranks"),
    (kwargs(nodes=2), "engine.nodes (value 2)|not divided evenly"),
    (kwargs(max_model_len=2), "prefill_config.engine_kwargs: max_model_len"),
    (kwargs(decode_context_parallel_size=2), "decode_context_parallel_size is not served"),
    (cluster({"engine_kwarg": {}}), "'prefill_config.engine_kwarg'|did you mean 'engine_kwargs'?"),
    (cluster(decode_confg={"engine_kwargs": {}}),
     "'decode_confg'|'decode_config'|allowed: engine, scheduler"),
    (cluster(limits(min_replica=1)), f"'{SCALING}.min_replica'|'min_replicas'"),
    (cluster(limits(3, 2)), f"{SCALING}|3 is more than max_replicas (2)"),
    (cluster({"deployment_config": {"num_replicas": 0}}),
     "prefill_config.deployment_config|at least one worker"),
    (cluster({"model_loading_config": {"model_id": "other", "model_source": WEIGHTS}}),
     "prefill_config and decode_config name different models"),
    (cluster(worker={"gang": "east"}), "worker.gang (value 'east'): leave it out on Ray"),
    (cluster(security={"tls": False}), "security: turn tls on, or set insecure"),
    (cluster(security={"tls": True, "join": "ca:1", "token": "hidden"}), "security.join: leave it out"),
    ({}, "engine.model is not set"),
    (scaled(limits(1, 8), ANY, autoscale={"prefill": "1-4"}),
     f"autoscale.prefill is 1-4 and {SCALING}.max_"),
    (scaled(ANY, FIXED), "decode_config.deployment_config.num_replicas"),
    (scaled(limits(0, initial_replicas=1), ANY), f"{SCALING}.min_replicas is 0"),
    (scaled(ANY, ANY, encode_config=limits(0, 2), autoscale={"encode": "0-3"}),
     "autoscale.encode is 0-3 and encode_config.deployment_config.autoscaling_config.max_replicas"),
    (scaled(ANY, ANY, encode_config=FIXED, autoscale={"encode": "0-3"}),
     "autoscale.mode is on and encode_config.deployment_config.num_replicas fixes a number"),
    (scaled(limits(5), ANY), "the minimum (5) is above the maximum (4)"),
    (scaled(ANY, ANY, autoscale={"decode": "2-4"}),
     "decode_config.deployment_config: it starts with 1, but autoscaling keeps 2 to 4"),
    (scaled(limits(upscale_delay=5), {}), "'prefill_config|upscale_delay'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        read(given)
    text = str(caught.value)
    assert "\n" not in text
    assert all(one in text for one in said.split("|")), text


@pytest.mark.parametrize("mode", ["on", "advise"])
def test_autoscaling_keeps_within_the_bounds_of_each_side(mode):
    settings = read(scaled(limits(2, 3), limits(), mode, autoscale={"decode": "1-6"}))
    own = Settings(**settings.tree_of("scheduler")).autoscale
    assert (own.mode, own.prefill, own.decode) == (mode, "2-3", "1-6")
    assert settings.bounds("prefill") == (2, 3)
    assert settings.bounds("decode") == ((1, 6) if mode == "on" else (1, None))


@pytest.mark.parametrize(
    ("encode", "own", "bounds", "initial"),
    [
        ({}, {}, (0, None), 0),
        (FIXED, {}, (0, None), 2),
        ({}, {"encode": "0-3"}, (0, 3), 0),
        (limits(0, 2, initial_replicas=1), {}, (0, 2), 1),
        (limits(1, 2), {}, (1, 2), 1),
    ],
)
def test_encode_workers_are_scaled_only_if_they_have_a_maximum(encode, own, bounds, initial):
    given = {"encode_config": encode} if encode else {}
    settings = read(scaled(limits(), limits(), autoscale=own, **given))
    assert (settings.bounds("encode"), settings.deploying("encode").initial) == (bounds, initial)


def test_without_autoscaling_bounds_are_those_of_scale_alone():
    settings = read(scaled(limits(0, 9, initial_replicas=1), {}, "off"))
    assert (settings.bounds("prefill"), settings.bounds("decode")) == ((0, 9), (0, None))
    assert Settings(**settings.tree_of("scheduler")).autoscale.prefill == "1-4"


def test_a_fixed_number_may_be_advised_on():
    settings = read(scaled(FIXED, FIXED, "advise"))
    assert settings.deploying("decode").initial == 2
    assert Settings(**settings.tree_of("scheduler")).autoscale.decode == "1-4"


def test_keys_by_which_serve_decides_are_read_and_named():
    given = limits(1, 3, target_ongoing_requests=2, upscale_delay_s=5, policy={"policy_function": "a:b"})
    settings = read(scaled(given, {}))
    keys = ("policy", "target_ongoing_requests", "upscale_delay_s")
    assert settings.unused == [f"{SCALING}.{key}" for key in keys]
    assert settings.bounds("prefill") == (1, 3)
    assert read(cluster()).unused == []


def test_the_keys_are_those_of_the_installed_ray():
    """Baton knows all of Serve's keys, including those that it ignores. Needs Serve."""
    serve = pytest.importorskip("ray.serve.config", exc_type=ImportError)
    known = {*Autoscaling.model_fields, *SERVES_OWN}
    assert not serve.AutoscalingConfig.model_fields.keys() - known


def test_the_environment_names_its_keys_too(monkeypatch):
    monkeypatch.setenv("BATON_ROUTER_CONFIG__DEPLOYMENT_CONFIG__NUM_REPLICAS", "2")
    assert read(cluster()).deploying("router").initial == 2
    monkeypatch.setenv("BATON_ROUTER_CONFIG__DEPLOYMENT", "2")
    with pytest.raises(ConfigError, match=r"'router_config\.deployment'; did you mean 'deployment_config'"):
        read(cluster())


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "ray").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_valid(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = read(path)
    assert settings.bundle("prefill")


def test_ray_is_not_imported():
    """Neither reading the configuration nor importing `baton.ray` needs Ray."""
    code = "import sys, baton.ray, baton.services.cli.main, baton.services.ray.serve_args\n"
    code += "baton.ray.deploy; assert 'ray' not in sys.modules"
    ran(PYTHON, "-c", code, check=True)
