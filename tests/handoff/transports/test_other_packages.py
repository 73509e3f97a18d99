"""A transport of another package, found by its entry point and used by real engines."""

import functools
import importlib.metadata
import os
import random
import sys
from pathlib import Path

import pytest

from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import HandoffError
from baton.services.config import load
from harness.engines import EngineProcess, Options, clear_prompt, decode, generate
from harness.packages import install
from harness.support import ROOT, eventually
from tests.handoff import checkpoints
from tests.handoff.caches import released
from tests.handoff.engines import loaded_of, read

PACKAGE = ROOT / "tests" / "plugins" / "baton-folder"
WRITTEN = 8


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install(PACKAGE, tmp_path_factory.mktemp("package"))


def reach(site, folder):
    """In an engine's process: make the package importable, and set its folder."""
    sys.path.insert(0, site)
    os.environ["KV_FOLDER"] = folder


@pytest.fixture(scope="module")
def kv_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engine(site, kv_folder, model):
    """An engine that hands over to itself, with only this transport."""
    prepare = functools.partial(reach, str(site), str(kv_folder))
    own = {"enable_prefix_caching": False}
    with EngineProcess(Options(model, "both", transports=("folder",), prepare=prepare, engine=own)) as made:
        yield made


def until_empty(folder):
    eventually(lambda: not list(folder.iterdir()), 10, "no file stays behind", 0.01)


@pytest.mark.timeout(240)
def test_kv_goes_through_files(engine, kv_folder):
    for length in (33, 300):
        draw = random.Random(length)
        prompt = clear_prompt(engine, lambda: draw.choices(range(2, checkpoints.VOCAB), k=length), WRITTEN)  # noqa: B023
        expected = engine.call(generate, f"alone-{length}", prompt, WRITTEN)
        manifest = read(engine, f"r-{length}", prompt)
        (shard,) = manifest.shards
        assert shard.offers.keys() == {"folder"}
        assert Path(os.fsdecode(shard.offers["folder"])).parent == kv_folder
        answer = engine.call(decode, f"r-{length}", prompt, WRITTEN, manifest)
        assert answer.tokens == expected
        loaded = loaded_of(answer)
        assert (loaded.transport, loaded.blocks) == ("folder", -(-(length - 1) // 32))
        until_empty(kv_folder)  # the release withdrew it


@pytest.mark.timeout(240)
def test_a_released_save_is_withdrawn(engine, kv_folder):
    prompt = random.Random(1).choices(range(2, checkpoints.VOCAB), k=100)
    manifest = read(engine, "unwanted", prompt)
    client = HandoffClient()
    assert released(client, manifest)
    client.close()
    until_empty(kv_folder)
    answer = engine.call(decode, "unwanted", prompt, WRITTEN, manifest)
    assert answer.finish_reason == "error"
    assert str(answer.loaded.problem).startswith("TransportFailed: ")
    assert "is gone" in str(answer.loaded.problem)


def test_its_name_can_be_configured_where_it_is_installed(site, monkeypatch):
    with pytest.raises(HandoffError, match="there is no handoff transport 'folder'"):
        transports.REGISTRY.check(["folder"])
    monkeypatch.syspath_prepend(str(site))
    assert "folder" in transports.REGISTRY.names()
    assert load({"handoff": {"transports": ["folder", "tcp"]}}).handoff.transports == ["folder", "tcp"]
    (point,) = importlib.metadata.entry_points(group="baton.handoff_transports")
    assert transports.REGISTRY.load("folder") is point.load()
