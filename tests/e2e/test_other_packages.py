"""A speculative method from another package, used by name."""

import openai
import pytest

from harness.deployment import MODEL_NAME, deployment
from harness.greedy import token_ids
from harness.packages import install
from harness.support import CALL_S, PATIENCE, ROOT

PACKAGE = ROOT / "tests" / "plugins" / "baton-copy"
SPEC = {"method": "copy", "num_speculative_tokens": 4, "parameters": {"most": 3}}
PROMPTS = [
    "one two three four five six seven eight nine one two three four five six",
    "The cat sat on the mat. " * 12,
    "def first(a, b):\n    return a + b\n\ndef second(a, b):\n    return a - b\n\ndef third(a, b):\n",
    "Name: Ada, age: 36\nName: Alan, age: 41\nName: Grace, age: 85\nName:",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the folder where pip installed the package and its entry point."""
    return install(PACKAGE, tmp_path_factory.mktemp("package"))


def answers(url, **baton):
    """Return the token ids of each prompt's greedy answer, and Baton's usage."""
    texts, usages = [], []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CALL_S) as client:
        for prompt in PROMPTS:
            done = client.completions.create(
                model=MODEL_NAME,
                prompt=prompt,
                max_tokens=48,
                temperature=0,
                extra_body={"return_token_ids": True, **baton},
            )
            texts.append(token_ids(done))
            usages.append(((done.usage and done.usage.model_extra) or {}).get("baton"))
    return texts, usages


@pytest.mark.timeout(300)
def test_it_drafts_and_the_answers_stay_the_same(installed, reference, tmp_path):
    with deployment(tmp_path, path=installed, engine={"speculative_config": SPEC}) as one:
        found, usages = answers(one.up().url, baton={"usage": True})
    assert found == answers(reference)[0]
    assert {usage["method"] for usage in usages} == {"copy"}
    assert sum(usage["accepted_tokens"] for usage in usages) > len(PROMPTS)
    assert all(usage["drafted_tokens"] <= 3 * usage["draft_steps"] for usage in usages)


@pytest.mark.timeout(60)
def test_without_the_package_the_name_is_refused(tmp_path):
    with deployment(tmp_path, engine={"speculative_config": SPEC}) as one:
        process = one.start("up", "up")
        assert process.wait(30 * PATIENCE) != 0
        assert "there is no speculative method 'copy'" in process.text
