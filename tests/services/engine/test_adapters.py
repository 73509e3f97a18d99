"""Adapters' folders: which are refused before a model is loaded, and which count as equal."""

import json
import shutil

import pytest

from baton.services.config import EngineSettings
from baton.services.engine.adapters import lora_args, read_adapters
from baton.services.engine.args import check_model, engine_args, served_names
from baton.services.errors import ConfigError
from harness.adapters import adapter
from harness.checkpoints import tiny_qwen2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")


def settings(model, adapters, **others):
    lora = {"adapters": {name: str(path) for name, path in adapters.items()}, **others}
    return EngineSettings(model=str(model), lora=lora)


def refused(one):
    with pytest.raises(ConfigError) as found:
        check_model(one)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_vllms_arguments(model, tmp_path):
    """There is room for all adapters, and for the highest rank in one of vLLM's sizes."""
    folders = {name: adapter(tmp_path / name, model, rank=rank) for name, rank in (("a", 2), ("b", 9))}
    one = settings(model, folders)
    args = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2, "max_cpu_loras": 2}
    assert lora_args(one) == args
    assert args.items() <= engine_args(one).items()
    assert lora_args(settings(model, folders, max_loras=1)) == args | {"max_loras": 1}
    assert lora_args(EngineSettings(model=str(model))) == {}
    assert served_names(one) == ["tiny", "a", "b"]
    assert served_names(EngineSettings(model=str(model))) == ["tiny"]


def test_folders_without_an_adapter_are_refused(model, tmp_path):
    gone = refused(settings(model, {"a": tmp_path / "gone"}))
    assert gone == f"engine.lora.adapters.a (value '{tmp_path}/gone'): the folder does not exist"
    assert "is no adapter in PEFT's layout" in refused(settings(model, {"a": model}))
    half = adapter(tmp_path / "half", model)
    (half / "adapter_model.safetensors").unlink()
    assert "holds no weights" in refused(settings(model, {"a": half}))
    (half / "adapter_model.safetensors").touch()
    (half / "adapter_config.json").write_text("{}")
    assert "names no rank" in refused(settings(model, {"a": half}))


def test_a_rank_above_vllms_limit_is_refused(model, tmp_path):
    high = adapter(tmp_path / "high", model)
    config = json.loads((high / "adapter_config.json").read_text())
    for ranks in ({"r": 513}, {"r": 2, "rank_pattern": {"q_proj": 513}}):
        (high / "adapter_config.json").write_text(json.dumps(config | ranks))
        why = refused(settings(model, {"high": high}))
        assert "its rank is 513, and vLLM takes at most 512" in why


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"hidden": 256}, "its model.layers.0.mlp.down_proj has 512 inputs, the model's 256"),
        ({"layers": 3}, "the model has no model.layers.2"),
    ],
)
def test_an_adapter_of_another_model_is_refused(model, tmp_path, other, difference):
    """vLLM would load the part that fits."""
    made_for = tiny_qwen2(tmp_path / "other", **other)
    why = refused(settings(model, {"a": adapter(tmp_path / "a", made_for)}))
    assert f"does not fit the model {str(model)!r} (it was made for 'other'): {difference}" in why


def test_an_adapter_with_the_models_name_is_refused(model, tmp_path):
    one = adapter(tmp_path / "a", model)
    assert "it has the name of the model itself" in refused(settings(model, {"tiny": one}))


def test_fingerprints_depend_on_the_files_and_not_on_their_folder(model, tmp_path):
    one = adapter(tmp_path / "a", model)
    copy = shutil.copytree(one, tmp_path / "copy")
    other = adapter(tmp_path / "b", model, seed=1)
    found = read_adapters(settings(model, {"x": one, "y": copy, "z": other}))
    x, y, z = (each.fingerprint for each in found)
    assert (x == y, x == z) == (True, False)
    weights = copy / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert read_adapters(settings(model, {"y": copy}))[0].fingerprint != x
    narrowed = settings(model, {"x": one}).model_copy(update={"extra": {"lora_target_modules": ["q_proj"]}})
    assert read_adapters(narrowed)[0].fingerprint != x
