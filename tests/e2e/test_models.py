"""Two models at one address: `baton up` starts both fleets, and one serves while the other is dead."""

import re

import openai
import psutil
import pytest

from harness.deployment import MODEL, deployment, status_of
from harness.support import eventually, free_port, freeze

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
START_S = 30.0


@pytest.fixture
def two(tmp_path_factory):
    """Serve the demo model with drafts by a prefill and a decode worker, and without by a mixed one."""
    models = {
        "drafting": {"workers": {"prefill": 1, "decode": 1}},
        "plain": {
            "workers": {"mixed": 1},
            "engine": {"model": str(MODEL), "speculative_config": None},
            "scheduler": {"address": f"127.0.0.1:{free_port()}"},
        },
    }
    with deployment(tmp_path_factory.mktemp("two"), models=models) as one:
        yield one.up()


def ask(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=12)
    assert answer.model == model
    return answer.choices[0].message.content or ""


@pytest.mark.timeout(240)
def test_one_address_serves_both_and_one_while_the_other_is_dead(two):
    client = two.client()
    assert [one.id for one in client.models.list().data] == ["drafting", "plain"]
    before = {name: ask(client, name) for name in ("drafting", "plain")}
    assert before["drafting"] == before["plain"] != ""  # the same weights, with and without drafts
    with pytest.raises(openai.NotFoundError, match=r"Served here: drafting, plain\.") as unknown:
        ask(client, "baton-demo")
    assert unknown.value.code == "model_not_found"

    def told():
        models = two.status()["models"]
        return models if models["drafting"].get("handoffs") else None

    found = eventually(told, START_S, "the handoff is reported")
    workers = {
        name: [worker["identity"]["worker_id"] for worker in found[name]["workers"]] for name in before
    }
    assert [one.rpartition(".")[0] for one in workers["plain"]] == ["plain-mixed-0"]
    assert sorted(one.rpartition(".")[0] for one in workers["drafting"]) == [
        "drafting-decode-0",
        "drafting-prefill-0",
    ]
    assert found["drafting"]["handoffs"][0]["prefill_worker_id"].startswith("drafting-prefill-0")

    health = f"{two.url}/health?model=plain"
    worker = psutil.Process(int(workers["plain"][0].rpartition(".")[2]))
    freeze(worker.pid)  # because a killed worker may be replaced before it is missed
    eventually(lambda: status_of(health) == 503, START_S, "plain has no worker")
    with pytest.raises(openai.InternalServerError, match="model 'plain': ") as refused:
        ask(client, "plain")
    assert refused.value.status_code == 503
    assert ask(client, "drafting") == before["drafting"]
    assert two.healthy()
    worker.kill()
    eventually(lambda: status_of(health) == 200, START_S, "plain has a worker again")
    assert ask(client, "plain") == before["plain"]
    assert re.search(r"plain-mixed-0 +died \(signal SIGKILL\); restarting", two.processes["up"].text)
