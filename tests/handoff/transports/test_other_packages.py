"""A transport of another package, found by its entry point and used by real engines."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import HandoffError
from baton.services.config import load
from harness.engines import EngineProcess, Options, clear_prompt, decode, generate, prefill
from harness.packages import install
from harness.support import PATIENCE, ROOT
from tests.handoff import checkpoints

PACKAGE = ROOT / "tests" / "plugins" / "baton-folder"
WRITTEN = 8


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(PACKAGE, tmp_path_factory.mktemp("package"))


def reach(site: str, folder: str) -> None:
    """In an engine's process: make the package importable, and set its folder."""
    sys.path.insert(0, site)
    os.environ["KV_FOLDER"] = folder


@pytest.fixture(scope="module")
def kv_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engines(
    site: Path, kv_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """A prefill and a decode engine that have only this transport."""
    model = checkpoints.qwen2(tmp_path_factory.mktemp("checkpoints") / "qwen2")
    prepare = functools.partial(reach, str(site), str(kv_folder))
    options = [
        Options(model, name, cores=core, transports=("folder",), prepare=prepare)
        for name, core in (("prefill", "0"), ("decode", "1"))
    ]
    with EngineProcess(options[0]) as first, EngineProcess(options[1]) as second:
        yield first, second


def until_empty(folder: Path) -> None:
    deadline = time.monotonic() + 10 * PATIENCE
    while list(folder.iterdir()):
        assert time.monotonic() < deadline, "a file stayed behind"
        time.sleep(0.01)


@pytest.mark.timeout(240)
def test_kv_goes_from_one_engine_to_another_through_files(
    engines: tuple[EngineProcess, EngineProcess], kv_folder: Path
) -> None:
    first, second = engines
    for length in (33, 300):
        draw = random.Random(length)
        prompt = clear_prompt(first, lambda: draw.choices(range(2, checkpoints.VOCAB), k=length), WRITTEN)  # noqa: B023
        expected = first.call(generate, f"alone-{length}", prompt, WRITTEN)
        saved = first.call(prefill, f"r-{length}", prompt).saved
        assert saved is not None
        assert saved.manifest is not None, saved.problem
        (shard,) = saved.manifest.shards
        assert shard.offers.keys() == {"folder"}
        assert Path(os.fsdecode(shard.offers["folder"])).parent == kv_folder
        answer = second.call(decode, f"r-{length}", prompt, WRITTEN, saved.manifest)
        assert answer.tokens == expected
        assert answer.loaded is not None
        assert answer.loaded.problem is None
        assert (answer.loaded.transport, answer.loaded.blocks) == ("folder", -(-(length - 1) // 32))
        until_empty(kv_folder)  # the release withdrew it


@pytest.mark.timeout(240)
def test_a_released_save_is_withdrawn(engines: tuple[EngineProcess, EngineProcess], kv_folder: Path) -> None:
    first, second = engines
    prompt = random.Random(1).choices(range(2, checkpoints.VOCAB), k=100)
    saved = first.call(prefill, "unwanted", prompt).saved
    assert saved is not None
    assert saved.manifest is not None
    client = HandoffClient()
    assert client.release(saved.manifest)
    client.close()
    until_empty(kv_folder)
    answer = second.call(decode, "unwanted", prompt, WRITTEN, saved.manifest)
    assert answer.finish_reason == "error"
    assert answer.loaded is not None
    assert str(answer.loaded.problem).startswith("TransportFailed: ")
    assert "is gone" in str(answer.loaded.problem)


def test_its_name_can_be_configured_where_it_is_installed(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HandoffError, match="there is no handoff transport 'folder'"):
        transports.REGISTRY.check(["folder"])
    monkeypatch.syspath_prepend(str(site))
    assert "folder" in transports.REGISTRY.names()
    assert load({"handoff": {"transports": ["folder", "tcp"]}}).handoff.transports == ["folder", "tcp"]
    (point,) = importlib.metadata.entry_points(group="baton.handoff_transports")
    assert transports.REGISTRY.load("folder") is point.load()
