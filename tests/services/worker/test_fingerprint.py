"""Equal for equal files, different for what differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.services.worker.fingerprint import model_fingerprint
from tests.checkpoints import tiny_qwen2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("fingerprint") / "model")


def test_a_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "README.md").write_text("not part of the model")
    assert model_fingerprint(str(copy)) == model_fingerprint(str(model))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_byte_is_another_model(model: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert model_fingerprint(str(copy)) != model_fingerprint(str(model))


def test_another_seed_is_another_model(model: Path, tmp_path: Path) -> None:
    assert model_fingerprint(str(tiny_qwen2(tmp_path / "b", seed=1))) != model_fingerprint(str(model))


def test_a_name_stands_for_itself() -> None:
    assert model_fingerprint("org/model") == model_fingerprint("org/model") != model_fingerprint("org/other")
