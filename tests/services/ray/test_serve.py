"""The number of workers and the options that Serve is given. test_ray_serve.py runs the parts."""

from types import SimpleNamespace

import pytest

from baton.services.ray.serve import UNBOUNDED, build_pd_openai_app, by_requests
from harness.deployment import MODEL


@pytest.mark.parametrize(
    ("placed", "wanted"),
    [({}, 1), ({"a": 0.0}, 1), ({"a": 4.0}, 2), ({"a": 4.0, "b": 4.1}, 5), ({"a": 90.0}, 6)],
)
def test_as_many_as_bring_the_requests_down_to_the_target(placed, wanted):
    """The target is two requests each, the bounds are 1 and 6. `placed`: requests by replica."""
    context = SimpleNamespace(
        aggregated_metrics={"requests": placed},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 2),
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=6,
    )
    assert by_requests(context) == (wanted, {})
    context.aggregated_metrics = None  # before the first worker has reported
    assert by_requests(context) == (1, {})


def deployments(**more):
    side = {
        "model_loading_config": {"model_id": "demo", "model_source": str(MODEL)},
        "placement_group_config": {"bundles": [{"CPU": 2, "slot": 1}]},
        "label_selector": {"zone": "a"},
    }
    own = {"num_replicas": "auto", "name": "mine", "health_check_period_s": 3}
    decode = side | {"deployment_config": own}
    app = build_pd_openai_app({"prefill_config": side, "decode_config": decode, **more})
    router = app._bound_deployment
    found = zip(("scheduler", "prefill", "decode", "encode"), router.init_args[2:], strict=False)
    return {"router": router} | {name: one._bound_deployment for name, one in found}


def test_the_proxy_hands_on_as_many_requests_as_come():
    """Serve's default is 5 per ingress replica; others would wait in its proxy, unseen by the router."""
    assert deployments()["router"].max_ongoing_requests == UNBOUNDED
    bounded = deployments(ingress_deployment_config={"max_ongoing_requests": 7, "num_replicas": 2})["router"]
    assert (bounded.max_ongoing_requests, bounded.num_replicas) == (7, 2)


def test_workers_reserve_their_bundle_and_keep_the_options_given():
    found = deployments()
    for name in ("prefill", "decode"):
        actor = found[name].ray_actor_options
        assert (actor["num_cpus"], actor["resources"]) == (2.0, {"slot": 1.0})
        assert actor["label_selector"] == {"zone": "a"}
    names = [found[name].name for name in ("scheduler", "prefill", "decode")]
    assert names == ["Scheduler", "Prefill", "mine"]
    scaling = found["decode"]._deployment_config.autoscaling_config
    assert scaling.policy.policy_function.endswith(by_requests.__name__)
    assert found["decode"]._deployment_config.health_check_period_s == 3
    assert found["prefill"]._deployment_config.autoscaling_config is None
    assert found["prefill"].num_replicas == 1


def test_encode_workers_are_a_deployment_of_their_own():
    assert "encode" not in deployments()
    given = {"deployment_config": {"num_replicas": 2}, "placement_group_config": {"bundles": [{"CPU": 3}]}}
    encode = deployments(encode_config=given)["encode"]
    assert (encode.name, encode.num_replicas, encode.ray_actor_options["num_cpus"]) == ("Encode", 2, 3.0)
