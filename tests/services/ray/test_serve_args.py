import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from baton.services.errors import ConfigError
from baton.services.ray.serve_args import read
from harness.deployment import MODEL

KV = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
SIDE = {
    "model_loading_config": {"model_id": "demo", "model_source": str(MODEL)},
    "engine_kwargs": {"max_num_seqs": 4, "kv_transfer_config": KV},
}


def args(prefill=SIDE, decode=SIDE, **more):
    return {"prefill_config": prefill, "decode_config": decode, **more}


class Loading(BaseModel):
    model_id: str
    model_source: str | None = None
    tokenizer_source: str | None = None


class Accelerator(BaseModel):
    kind: str


class LLMConfig(BaseModel, validate_assignment=True):
    """Like Ray's: it fills in the accelerator itself, and has defaults."""

    model_loading_config: Loading
    engine_kwargs: dict[str, Any] = {}
    llm_engine: str = "vLLM"
    log_engine_metrics: bool | None = True
    lora_config: dict[str, Any] | None = None
    callback_config: dict[str, Any] = {"callback_class": "ray.llm.CallbackBase"}
    deployment_config: dict[str, Any] = {}
    accelerator_config: Accelerator | None = None

    def model_post_init(self, _context):
        self.accelerator_config = Accelerator(kind="gpu")


def an_object():
    return LLMConfig(**SIDE)


def a_file(folder):
    path = folder / "side.yaml"
    path.write_text(yaml.safe_dump(SIDE))
    return str(path)


@pytest.mark.parametrize("way", ["mapping", "file", "object", "all as an object"])
def test_every_way_to_give_a_side_is_the_same(way, tmp_path, caplog):
    class Args(BaseModel):
        prefill_config: LLMConfig
        decode_config: LLMConfig

    given = {
        "mapping": args,
        "file": lambda: args(a_file(tmp_path), Path(a_file(tmp_path))),
        "object": lambda: args(an_object(), an_object()),
        "all as an object": lambda: Args(prefill_config=an_object(), decode_config=an_object()),
    }[way]()
    found = read(given)
    assert found.settings.model == "demo"
    for role in ("prefill", "decode"):
        engine = found.settings.engine_of(role)
        assert (engine.model, engine.max_num_seqs, engine.extra) == (str(MODEL), 4, {})
    assert found.options == {"router": {}, "prefill": {}, "decode": {}}
    assert not caplog.records


def test_serves_options_are_kept_for_serve():
    class Scaling(BaseModel):
        min_replicas: int = 1
        max_replicas: int = 1
        look_back_period_s: float = 30.0

    decode = {"autoscaling_config": Scaling(max_replicas=4), "health_check_period_s": 1}
    found = read(
        args(
            {**SIDE, "deployment_config": {"num_replicas": "auto", "autoscaling_config": None}},
            {**SIDE, "deployment_config": decode},
            ingress_deployment_config={"num_replicas": 2},
        )
    )
    assert found.options == {
        "router": {"num_replicas": 2},
        "prefill": {"num_replicas": "auto", "autoscaling_config": {}},
        "decode": {"autoscaling_config": {"max_replicas": 4}, "health_check_period_s": 1},
    }


def test_what_has_no_meaning_is_ignored_in_one_warning(caplog):
    side = {
        **SIDE,
        "model_loading_config": {**SIDE["model_loading_config"], "tokenizer_source": "org/other"},
        "llm_engine": "vLLM",
        "log_engine_metrics": True,
        "experimental_configs": {"stream_batching_interval_ms": 50},
        "accelerator_config": {"kind": "cpu"},
        "lora_config": None,
        "callback_config": {},
    }
    with caplog.at_level(logging.WARNING):
        found = read(
            args(
                side,
                ingress_cls_config={"ingress_extra_kwargs": {"a": 1}},
                proxy_cls_config={"proxy_cls": "mine"},
                proxy_deployment_config={"num_replicas": 2},
            )
        )
    assert found.settings.engine_of("prefill") == found.settings.engine_of("decode")
    (record,) = caplog.records
    for name in (
        "ingress_cls_config",
        "proxy_cls_config",
        "proxy_deployment_config",
        "prefill_config.log_engine_metrics",
        "prefill_config.experimental_configs",
        "prefill_config.model_loading_config.tokenizer_source",
    ):
        assert name in record.getMessage()
    assert "accelerator_config" not in record.getMessage()


def test_a_mirror_that_names_no_bucket_leaves_the_models_name():
    loading = {"model_id": str(MODEL), "model_source": {"bucket_uri": None, "extra_files": []}}
    side = {**SIDE, "model_loading_config": loading}
    assert read(args(side, side)).settings.engine_of("prefill").model == str(MODEL)


def loading(source):
    return {"model_loading_config": {"model_id": "demo", "model_source": source}}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lora_config": {"dynamic_lora_loading_path": "s3://a"}},
         "lora_config: adapters are loaded at the start"),
        ({"callback_config": {"callback_class": "a.B"}}, "callback_config: workers run no callbacks"),
        ({"server_cls": "a.SGLangServer"}, "server_cls: the server is Baton's own"),
        ({"llm_engine": "SGLang"}, "llm_engine: 'SGLang' is not supported"),
        ({"accelerator_config": {"kind": "tpu", "topology": "4x4"}},
         "accelerator_config: 'tpu' is not supported"),
        (loading("gs://bucket/model"),
         "model_source: models cannot be loaded from a bucket (gs://bucket/model)"),
        (loading({"bucket_uri": "s3://bucket/model"}),
         "models cannot be loaded from a bucket (s3://bucket/model)"),
        (loading({"extra_files": [{"bucket_uri": "s3://b/f", "destination_path": "/f"}]}),
         "models cannot be loaded from a bucket (s3://b/f)"),
        (loading({"bucket": "s3://b"}), "model_source: unknown key 'bucket'; did you mean 'bucket_uri'"),
        (loading(["a"]), "model_source: expected a mapping, not list"),
        ({"placement_group_config": {"strategy": "SPREAD"}},
         "prefill_config.placement_group_config.strategy"),
        ({"deployment_config": ["a"]}, "prefill_config.deployment_config: expected a mapping, not list"),
        ({"engine_kwargs": {"tensor_parallel_size": 2, "nnodes": 2}},
         "prefill_config.engine_kwargs.nodes (value 2): a replica of Ray Serve is on one node"),
        ({"engine_kwarg": {}}, "'prefill_config.engine_kwarg'; did you mean 'engine_kwargs'"),
        (loading("other/model"), "name different models"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(more, said):
    test_arguments_are_refused_in_one_line(args({**SIDE, **more}, security={"plain_ranks": True}), said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (args("nowhere.yaml"), "prefill_config: cannot read the file 'nowhere.yaml': No such file"),
        (args(__file__), "test_serve_args.py' is not valid YAML"),
        (args(7), "prefill_config: expected a mapping, not int"),
        (7, "the arguments: expected a mapping, not int"),
        (args(ingress_config={}), "unknown key 'ingress_config'; did you mean 'ingress_deployment_config'"),
    ],
)
def test_arguments_are_refused_in_one_line(given, said):
    with pytest.raises(ConfigError) as caught:
        read(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
