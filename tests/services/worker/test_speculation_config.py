"""The speculative settings given to vLLM."""

import json
import shutil
import warnings

import pytest

from baton.services.config import load
from baton.services.engine.build import EnginePlan, build_config
from baton.services.engine.patches.draft_length import least_drafts
from baton.services.engine.rank_settings import ADDITIONAL
from baton.services.errors import ConfigError
from harness.architectures.registry import ARCHITECTURES

MIMO = ARCHITECTURES["mtp-mimo"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def built(model, spec, **engine):
    """Return the VllmConfig of a worker of any role."""
    small = {"model": str(model), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    settings = load({"engine": {**small, "speculative_config": spec, **engine}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_config(EnginePlan(settings, "w", "f00", needs_handoffs=True))


@pytest.fixture(scope="module")
def mimo():
    return MIMO.target(MIMO.checkpoint())


@pytest.mark.parametrize(
    ("tokens", "limit", "by_batch"),
    [(3, 3, [(1, 8, 3)]), ("auto", 5, [(1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 4, 3), (5, 5, 4), (6, 8, 5)])],
)
def test_every_worker_can_draft(mimo, tokens, limit, by_batch):
    config = built(mimo, {"method": "mimo_mtp", "num_speculative_tokens": tokens})
    assert config.speculative_config.method == "mtp"
    assert config.speculative_config.num_speculative_tokens == limit
    assert config.speculative_config.num_speculative_tokens_per_batch_size == by_batch
    ours = config.additional_config[ADDITIONAL]["speculative"]
    assert (ours["method"], ours["num_speculative_tokens"]) == ("mtp", tokens)


@pytest.mark.parametrize(("layers", "least"), [(1, 0), (2, 2)])
def test_every_mtp_layer_computes_the_prompt(tmp_path, layers, least):
    """All layers need KV, even on a worker that does not decode."""
    one = ARCHITECTURES["mtp-deepseek-v3"]
    target = tmp_path / "two-layers"
    shutil.copytree(one.target(one.checkpoint()), target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": layers}))
    read = built(target, {"method": "mtp", "num_speculative_tokens": 4})
    assert least_drafts(read) == least


@pytest.mark.parametrize("spec", [{"method": "mtp", "num_speculative_tokens": 2}, NGRAM])
def test_drafts_in_a_pipeline_are_refused_where_vllm_cannot(mimo, spec):
    said = r"^engine\.pipeline_parallel_size \(value 2\): vLLM's model runner V1"
    with pytest.raises(ConfigError, match=said):
        built(mimo, spec, pipeline_parallel_size=2)


def test_block_verification_is_refused_where_vllm_cannot(mimo):
    spec = {"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": "block"}
    with pytest.raises(ConfigError, match="only in its model runner V2"):
        built(mimo, spec)
