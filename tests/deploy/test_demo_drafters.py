"""The demo model's drafters: their training and their files."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "demo-model"
WEIGHTS, MTP, EAGLE3 = (FOLDER / name for name in ("weights", "weights-mtp", "eagle3"))

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _modules_of_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the training scripts on the path: they import each other by file name."""
    monkeypatch.syspath_prepend(str(FOLDER))


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


def test_mtp_view_links_the_trunk() -> None:
    for path in MTP.iterdir():
        if path.is_symlink():
            assert not Path(path.readlink()).is_absolute()
            assert path.resolve(strict=True).parent == WEIGHTS
    assert (MTP / "model-trunk.safetensors").samefile(WEIGHTS / "model.safetensors")
    assert (MTP / "tokenizer.json").samefile(WEIGHTS / "tokenizer.json")
    own = [path for folder in (MTP, EAGLE3) for path in folder.iterdir() if not path.is_symlink()]
    assert sum(path.stat().st_size for path in own) < 4 * 2**20
