"""Fingerprints are equal for equal models, and only for them."""

import hashlib
import logging
import shutil

import pytest
from huggingface_hub import constants

from baton.services.engine import fingerprint
from baton.services.engine.fingerprint import model_fingerprint
from harness.checkpoints import tiny_qwen2


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Keep digests out of the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("fingerprint") / "model")


def test_a_copy_is_the_same_model(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "README.md").write_text("not part of the model")
    assert model_fingerprint(str(copy)) == model_fingerprint(str(model))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_byte_is_another_model(model, tmp_path, name):
    copy = shutil.copytree(model, tmp_path / "copy")
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert model_fingerprint(str(copy)) != model_fingerprint(str(model))


@pytest.mark.parametrize(
    "name",
    ["modeling_x.py", "hf_quant_config.json", "pytorch_model.pt", "params.json", "preprocessor_config.json"],
)
def test_other_files_that_affect_the_computation_count(model, tmp_path, name):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / name).write_text("1")
    first = model_fingerprint(str(copy))
    (copy / name).write_text("2")
    assert len({first, model_fingerprint(str(copy)), model_fingerprint(str(model))}) == 3


def test_a_snapshots_folder_is_the_same_model_as_a_copy(model, cache):
    publish(cache, model, OLD)
    snapshot = cache / "models--org--tiny" / "snapshots" / OLD
    assert model_fingerprint(str(snapshot)) == model_fingerprint(str(model))


OLD, NEW = "1" * 40, "2" * 40  # commits


def publish(cache, model, commit):
    """Put a commit's files into Hugging Face's cache: links to blobs named by their hashes."""
    repository = cache / "models--org--tiny"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / commit
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (repository / "refs" / "main").write_text(commit)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the hub's cache, with the hub offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_name_is_identified_by_its_commit(model, cache):
    publish(cache, model, OLD)
    (cache / "models--org--tiny" / "refs" / "v1").write_text(OLD)
    old = model_fingerprint("org/tiny")
    assert old == model_fingerprint("org/tiny", revision="v1") == model_fingerprint("org/tiny", revision=OLD)
    publish(cache, model, NEW)
    new = model_fingerprint("org/tiny")
    assert new == model_fingerprint("org/tiny", revision=NEW) != old
    assert model_fingerprint("org/tiny", revision="v1") == old


def test_download_dir_is_searched(model, cache, tmp_path):
    publish(cache, model, OLD)
    publish(tmp_path / "elsewhere", model, NEW)
    elsewhere = model_fingerprint("org/tiny", download_dir=str(tmp_path / "elsewhere"))
    assert elsewhere == model_fingerprint("org/tiny", revision=NEW)


@pytest.fixture(autouse=True)
def _warnings(caplog):
    """Enable warnings: a package that vLLM's app imports sets the root logger to ERROR."""
    caplog.set_level(logging.WARNING, fingerprint.__name__)


@pytest.mark.usefixtures("cache")
def test_a_name_whose_commit_is_unknown(caplog):
    known = [model_fingerprint(name) for name in ("org/tiny", "org/other", "not/a/name")]
    known.append(model_fingerprint("org/tiny", revision="v1"))
    assert len(set(known)) == 4
    assert model_fingerprint("org/tiny") == known[0]
    assert "identified only by its name, org/tiny at revision main: " in caplog.text


def test_models_of_another_hub(model, cache, monkeypatch, caplog):
    publish(cache, model, OLD)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert model_fingerprint("org/tiny") != model_fingerprint("org/tiny", revision="v1")
    assert "it comes from ModelScope" in caplog.text
