"""LoRA adapters, requested by name, through a prefill and a decode worker."""

import httpx
import openai
import pytest

from harness.adapters import adapter
from harness.checkpoints import tiny_qwen2
from harness.deployment import deployment
from harness.greedy import GREEDY, token_ids
from harness.support import CALL_S

NAMES = ("tiny", "first", "second")
PROMPT = "The old captain looked at the sea, and the sea looked at the old captain. "


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    model = tiny_qwen2(folder / "tiny")
    adapters = {name: str(adapter(folder / name, model, seed=n)) for n, name in enumerate(NAMES[1:], 1)}
    engine = {
        "model": str(model),
        "served_model_name": "tiny",
        "speculative_config": None,
        "tool_call_parser": None,
        "lora": {"adapters": adapters},
    }
    with deployment(folder / "deployment", engine=engine) as one:
        yield one.up()


def answer(client, model):
    done = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, **GREEDY)
    assert done.model == model
    return str(token_ids(done))


@pytest.mark.timeout(120)
def test_models_and_adapters_side_by_side(adapted):
    client = adapted.client()
    listed = {one.id: (one.model_extra or {}).get("parent") for one in client.models.list()}
    assert listed == {"tiny": None, "first": "tiny", "second": "tiny"}
    answers = {name: answer(client, name) for name in NAMES}
    assert len(set(answers.values())) == len(NAMES)
    assert {name: answer(client, name) for name in NAMES} == answers  # from the prefix caches
    with pytest.raises(openai.NotFoundError, match="The model `third` does not exist"):
        answer(client, "third")
    for path in ("load", "unload"):
        body = {"lora_name": "third", "lora_path": "/third"}
        refused = httpx.post(f"{adapted.url}/v1/{path}_lora_adapter", json=body, timeout=CALL_S)
        assert refused.status_code == 404
        assert refused.json()["error"]["type"] == "NotFoundError"
