"""Impossible speculative settings are refused with what would work."""

import json

import pytest

from baton.services.config import EngineSettings, load
from baton.services.decode.proposers import validation
from baton.services.errors import ConfigError

TARGET = {"model_type": "qwen2", "num_hidden_layers": 8, "vocab_size": 100, "num_nextn_predict_layers": 0}


def folder(path, **config):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**TARGET, **config}))
    return str(path)


@pytest.fixture
def target(tmp_path):
    return folder(tmp_path / "target")


def engine(target, /, **spec):
    return load({"engine": {"model": target, "speculative_config": spec}}).engine


def refusal(target, /, **spec):
    with pytest.raises(ConfigError) as error:
        validation.check(engine(target, **spec))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_speculation_is_no_method(target):
    assert validation.check(EngineSettings(model=target)) is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "value 0", "from 1 to 32, or 'auto'"]),
        ({"num_speculative_tokens": "lots"}, ["'lots'", "from 1 to 32, or 'auto'"]),
        ({"num_speculative_tokens": 2.5}, ["2.5", "from 1 to 32"]),
        ({"num_speculative_tokens": 2, "max_speculative_tokens": 3}, ["is for num_speculative", "'auto'"]),
        ({"prompt_lokup_max": 3}, ["prompt_lokup_max", "did you mean 'prompt_lookup_max'?"]),
        ({"mtp_strategy": "with_luck"}, ["mtp_strategy", "'with_luck'", "'with_ngram'"]),
    ],
)
def test_a_wrong_value_is_named(spec, said):
    with pytest.raises(ConfigError) as error:
        load({"engine": {"speculative_config": {"method": "ngram", **spec}}})
    for words in said:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"method": "ngrm"}, "did you mean 'ngram'?"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_max, which is 3",
        ),
        ({"method": "ngram", "model": "x"}, "'ngram' does not use it"),
        ({"method": "ngram", "quantization": "fp8"}, "a method that has a draft model"),
        ({"method": "ngram", "num_model_steps": 1}, "mtp_strategy 'with_ngram' or 'with_suffix'"),
        ({"method": "ngram", "mtp_strategy": "with_ngram"}, "it goes with mtp, eagle and eagle3"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 9}, "it goes with suffix"),
        ({"method": "ngram", "parameters": {"a": 1}}, "methods of other packages"),
        ({"method": "mtp"}, "has no MTP layers"),
        ({"method": "deepseek_mtp"}, "ngram and suffix work with any model"),
        ({"method": "eagle"}, "needs an EAGLE head: give its folder"),
        ({"method": "eagle3"}, "needs an EAGLE-3 head"),
        ({"method": "draft_model"}, "needs a small model"),
        ({"method": "medusa", "num_speculative_tokens": 2}, "needs the Medusa heads"),
        ({"method": "medusa"}, "drafts the same number in each step"),
        ({"method": "eagle", "model": "/nowhere"}, "'/nowhere'): this folder does not exist"),
    ],
)
def test_impossible_settings_are_refused(target, spec, said):
    assert said in refusal(target, **spec)


def test_a_draft_model_needs_a_config_json(target, tmp_path):
    assert "holds no config.json" in refusal(target, method="eagle", model=str(tmp_path))


def test_an_eagle_head_is_accepted(target, tmp_path):
    spec = {"method": "eagle", "model": folder(tmp_path / "head"), "num_speculative_tokens": 3}
    settings = engine(target, **spec)
    method = validation.check(settings)
    assert method.keeps_kv
    assert method.engine_config(settings.speculative_config) == spec


def test_keys_of_the_hybrid_need_its_strategy(target, tmp_path):
    head = {"method": "eagle", "model": folder(tmp_path / "head")}
    assert "with_ngram" in refusal(target, **head, prompt_lookup_max=3)
    assert "with_suffix" in refusal(target, **head, num_model_steps=1)
    hybrid = {**head, "mtp_strategy": "with_ngram", "num_speculative_tokens": 4}
    assert "it goes with suffix" in refusal(target, **hybrid, suffix_decoding_min_token_prob=0.5)
    assert "cannot be above the 4 drafted tokens" in refusal(target, **hybrid, num_model_steps=5)
    assert validation.check(engine(target, **hybrid, num_model_steps=4, prompt_lookup_max=3)) is not None


@pytest.mark.parametrize(
    "config",
    [
        {"num_nextn_predict_layers": 1},
        {"mtp_num_hidden_layers": 1},
        {"text_config": {"mtp_num_hidden_layers": 1}, "num_nextn_predict_layers": None},
        {"model_type": "qwen3_next", "num_nextn_predict_layers": None},
    ],
)
def test_mtp_layers_are_found(tmp_path, config):
    assert validation.check(engine(folder(tmp_path / "m", **config), method="mtp")) is not None


def test_the_length_is_a_multiple_of_the_mtp_layers(tmp_path):
    model = folder(tmp_path / "m", num_nextn_predict_layers=2)
    assert "set it to 4 or 6" in refusal(model, method="mtp", num_speculative_tokens=5)
    assert "max_speculative_tokens" in refusal(model, method="mtp", max_speculative_tokens=3)
    for fits in (1, 2, 4):
        validation.check(engine(model, method="mtp", num_speculative_tokens=fits))


def test_eagle3_needs_different_layers(tmp_path):
    shallow = folder(tmp_path / "target", num_hidden_layers=5)
    head = folder(tmp_path / "plain")
    said = refusal(shallow, method="eagle3", model=head)
    assert "eagle_aux_hidden_state_layer_ids" in said
    assert "[2, 2, 2]" in said
    good = folder(tmp_path / "good", eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    assert validation.check(engine(shallow, method="eagle3", model=good)) is not None
    deep = folder(tmp_path / "deep", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 9]})
    assert "[1, 3, 9]" in refusal(shallow, method="eagle3", model=deep)


def test_eagle3_is_refused_for_mimo(tmp_path):
    mimo = folder(tmp_path / "target", architectures=["MiMoForCausalLM"], num_hidden_layers=30)
    said = refusal(mimo, method="eagle3", model=folder(tmp_path / "head"))
    assert "does not provide the hidden states" in said
    assert "mtp" in said


def test_a_draft_model_has_the_targets_vocabulary(target, tmp_path):
    other = folder(tmp_path / "other", vocab_size=99)
    assert "99 tokens, the target's 100" in refusal(target, method="draft_model", model=other)
    misleading = folder(tmp_path / "eagle3-like")
    assert "contains 'eagle3'" in refusal(target, method="draft_model", model=misleading)


def test_medusa_drafts_one_token_per_head(target, tmp_path):
    heads = folder(tmp_path / "heads", num_heads=4)
    medusa = {"method": "medusa", "model": heads}
    assert "4 heads" in refusal(target, **medusa, num_speculative_tokens=3)
    assert validation.check(engine(target, **medusa, num_speculative_tokens=4)) is not None


def test_the_ranks_of_the_draft_model(target, tmp_path):
    draft = folder(tmp_path / "draft")
    for method, ranks, allowed in (("draft_model", 1, "set it to 4"), ("eagle", 2, "set it to 1 or 4")):
        spec = {"method": method, "model": draft, "draft_tensor_parallel_size": ranks}
        settings = engine(target, **spec)
        settings.tensor_parallel_size = 4
        with pytest.raises(ConfigError, match=allowed):
            validation.check(settings)


def test_a_model_by_name_is_not_checked():
    assert validation.check(engine("somebody/model", method="mtp")) is not None
    assert validation.check(engine("somebody/model", method="eagle3", model="somebody/head")) is not None


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("num_speculative_tokens", {"num_speculative_tokens": "auto"}),
        ("mtp_strategy", {"num_speculative_tokens": 4, "mtp_strategy": "with_suffix", "num_model_steps": 1}),
    ],
)
def test_a_gang_must_draft_alike(tmp_path, key, more):
    mtp = folder(tmp_path / "mtp", model_type="qwen3_5", num_nextn_predict_layers=1)
    settings = engine(mtp, method="mtp", **more)
    settings.data_parallel_size = 2
    with pytest.raises(ConfigError, match=rf"^engine\.speculative_config\.{key} .*the engines of a gang"):
        validation.check(settings)
