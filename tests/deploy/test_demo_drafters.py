"""The demo model's drafters: their training and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "demo-model"
WEIGHTS, MTP, EAGLE3 = (FOLDER / name for name in ("weights", "weights-mtp", "eagle3"))

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")


@pytest.fixture(autouse=True)
def _modules_of_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the training scripts on the path: they import each other by file name."""
    monkeypatch.syspath_prepend(str(FOLDER))


def shapes(path: Path) -> dict[str, list[int]]:
    with safetensors.safe_open(path, framework="pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 (no mapping)


def block(inputs: int, *, bias: bool) -> dict[str, list[int]]:
    """Return the tensors of a layer without norms: 4 query and 2 KV heads of 64, MLP 512."""
    found = {
        "mlp.gate_proj.weight": [512, 256],
        "mlp.up_proj.weight": [512, 256],
        "mlp.down_proj.weight": [256, 512],
    }
    for name, outputs in {"q_proj": 256, "k_proj": 128, "v_proj": 128}.items():
        found[f"self_attn.{name}.weight"] = [outputs, inputs]
        if bias:
            found[f"self_attn.{name}.bias"] = [outputs]
    return found | {"self_attn.o_proj.weight": [256, 256]}


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_training_matches_serving(kind: str) -> None:
    """Serving appends a draft's own hidden states; training does so at all positions at once."""
    from drafting import STEPS, document_mask, draft_features, new_head, trunk_states
    from heads import Rope

    torch.manual_seed(0)
    trunk = transformers.AutoModelForCausalLM.from_pretrained(
        WEIGHTS, dtype=torch.float32, attn_implementation="eager"
    )
    head = new_head(kind, trunk)
    for weights in head.parameters():
        torch.nn.init.normal_(weights, std=0.2)
    ids = torch.randint(4, 4096, (1, 21))
    lengths = (9, 12)  # two documents in one row
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.inference_mode():
        _, steps = draft_features(head, trunk, ids, positions)
        second, places = ids[:, lengths[0] :], positions[:, lengths[0] :]
        one = torch.zeros_like(places)
        states = trunk_states(trunk, second, places, document_mask(one, 0))
        begun, embeds = head.start(states), trunk.model.embed_tokens(second[:, 1:])
        for base in range(lengths[1] - STEPS - 1):
            hidden = begun[:, : base + 1]
            for step in range(STEPS):
                end = base + step + 1
                mask, rope = document_mask(one[:, :end], 0), Rope(places[:, :end], 64, 10_000.0)
                out, fed_back = head(hidden, embeds[:, :end], rope, mask, [])
                torch.testing.assert_close(
                    steps[step][0, lengths[0] + base + step], out[0, -1], rtol=1e-3, atol=1e-3
                )
                hidden = torch.cat([hidden, fed_back[:, -1:]], 1)


def test_only_the_trunks_own_tokens_count() -> None:
    from drafting import counted_places

    #                        prompt   reply            prompt  reply
    weights = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1]])
    places = [mask[0].nonzero().flatten().tolist() for mask in counted_places(weights)]
    assert places[0] == [2, 3, 4, 5, 10, 11]  # position p predicts token p + 2
    assert places[1] == [3, 4, 5, 11]
    assert places[2] == [4, 5]
    assert places[3] == [5]


def test_mtp_view_adds_one_layer_to_the_trunk() -> None:
    index = json.loads((MTP / "model.safetensors.index.json").read_text())["weight_map"]
    trunk, layer = shapes(WEIGHTS / "model.safetensors"), shapes(MTP / "model-mtp.safetensors")
    assert set(index) == set(trunk) | set(layer)
    norms = (
        "token_layernorm",
        "hidden_layernorm",
        "input_layernorm",
        "post_attention_layernorm",
        "final_layernorm",
    )
    expected = (
        block(256, bias=True) | {"input_proj.weight": [256, 512]} | {f"{n}.weight": [256] for n in norms}
    )
    assert layer == {f"model.mtp_layers.0.{name}": shape for name, shape in expected.items()}
    config, base = (json.loads((folder / "config.json").read_text()) for folder in (MTP, WEIGHTS))
    assert config == base | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def test_mtp_view_links_the_trunk() -> None:
    for path in MTP.iterdir():
        if path.is_symlink():
            assert not Path(path.readlink()).is_absolute()
            assert path.resolve(strict=True).parent == WEIGHTS
    assert (MTP / "model-trunk.safetensors").samefile(WEIGHTS / "model.safetensors")
    assert (MTP / "tokenizer.json").samefile(WEIGHTS / "tokenizer.json")
    own = [path for folder in (MTP, EAGLE3) for path in folder.iterdir() if not path.is_symlink()]
    assert sum(path.stat().st_size for path in own) < 4 * 2**20


def test_transformers_reads_the_mtp_view_as_the_trunk() -> None:
    models: list[Any] = [
        transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (WEIGHTS, MTP)
    ]
    trunk, view = (dict(model.named_parameters()) for model in models)
    assert trunk.keys() == view.keys()
    assert all(torch.equal(trunk[name], view[name]) for name in trunk)


def test_eagle3_draft_is_one_layer_without_embeddings() -> None:
    expected = {f"midlayer.{name}": shape for name, shape in block(512, bias=False).items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        expected[f"midlayer.{norm}.weight"] = [256]
    expected |= {"fc.weight": [256, 768], "norm.weight": [256]}
    assert shapes(EAGLE3 / "model.safetensors") == expected
    config = json.loads((EAGLE3 / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["norm_before_residual"] is True  # as Eagle3Head computes it
    layers = config["eagle_aux_hidden_state_layer_ids"]
    assert len(set(layers)) == len(layers) == 3
    assert config["draft_vocab_size"] == config["vocab_size"] == 4096
