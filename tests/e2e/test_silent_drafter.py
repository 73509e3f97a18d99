"""A decode worker whose drafter lost its state gives right answers slowly, which raises an alarm."""

import asyncio
import itertools
import json

import pytest

from bench.prompts import dialogues
from harness.deployment import MODEL_NAME, deployment
from harness.support import QUICK, ROOT, eventually

DEMO = ROOT / "deploy" / "demo-model"
FORGETFUL = ROOT / "harness" / "forgetful"
ENGINE = {
    "model": str(DEMO / "weights-mtp"),
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
}
REQUESTS = 16
# The alarm judges fewer requests and drafts than in production.
SOON = {
    "baton.services.decode.acceptance:LEAST_REQUESTS": 10,
    "baton.services.decode.acceptance:LEAST_DRAFTS": 30,
}
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def prompts():
    """Return requests to repeat a text, so that the drafter depends on the prompt's KV."""
    drawn = itertools.islice(dialogues(7, "copying"), REQUESTS)
    return [[{"role": one.role, "content": one.content} for one in chat.messages[:-1]] for chat in drawn]


async def _answers(one, prompts):
    slots = asyncio.Semaphore(4)

    async def ask(client, prompt):
        async with slots:
            return await client.chat.completions.create(
                model=MODEL_NAME,
                messages=prompt,
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"baton": {"usage": True}},
            )

    async with one.async_client() as client:
        return list(await asyncio.gather(*(ask(client, prompt) for prompt in prompts)))


def answers(one, prompts):
    return asyncio.run(_answers(one, prompts))


def texts(answers):
    return [answer.choices[0].message.content for answer in answers]


def first_acceptance(answers):
    """Return the acceptance rate of the first drafted position over all answers."""
    told = [answer.usage.baton for answer in answers]
    steps = sum(one["draft_steps"] for one in told)
    assert steps > 60
    return (
        sum(one["draft_steps"] * one["acceptance_by_position"][0] for one in told if one["draft_steps"])
        / steps
    )


def drafting(one):
    """Return the decode worker's report of its drafts."""
    return one.worker("decode")["load"]["drafting"]


def warnings(one):
    logs = [path.read_text() for path in (one.folder / "logs").glob("*.log")]
    return [line for log in logs for line in log.splitlines() if " drafts is " in line]


@pytest.fixture(scope="module")
def aggregated(prompts, tmp_path_factory):
    """Return the reference answers of a mixed worker, without handoffs."""
    with deployment(tmp_path_factory.mktemp("aggregated"), engine=ENGINE) as one:
        return answers(one.up(0, 0, 1), prompts)


def configured(folder, aggregated, path=None):
    reference = round(first_acceptance(aggregated), 3)
    spec = {**ENGINE["speculative_config"], "acceptance_reference": reference}
    engine = {**ENGINE, "speculative_config": spec}
    scheduler = {"idle_decode_tokens": 0}  # every prompt is handed over
    return deployment(folder, path=path, constants=SOON | QUICK, engine=engine, scheduler=scheduler)


@pytest.mark.timeout(300)
def test_a_drafter_whose_state_came_along_raises_no_alarm(aggregated, prompts, tmp_path):
    with configured(tmp_path, aggregated) as one:
        got = answers(one.up(), prompts)
        assert texts(got) == texts(aggregated)
        # The prefill worker generates the first token. The first step after the handoff verifies drafts that
        # came along, so every further token has a draft step or was accepted; the last step's may be cut off.
        for told in (one.usage for one in got):
            own = told.baton
            assert told.completion_tokens - 1 <= own["draft_steps"] + own["accepted_tokens"]
        assert first_acceptance(got) > 0.95 * first_acceptance(aggregated)
        eventually(lambda: int(drafting(one)["drafts"]) > 60, 10, "the drafts are reported")
        assert not drafting(one).get("alarm", False)
        assert warnings(one) == []


@pytest.mark.timeout(300)
def test_a_drafter_whose_state_was_dropped_raises_the_alarm(aggregated, prompts, tmp_path):
    with configured(tmp_path, aggregated, FORGETFUL) as one:
        got = answers(one.up(), prompts)
        assert texts(got) == texts(aggregated)
        print(json.dumps({"reference": first_acceptance(aggregated), "dropped": first_acceptance(got)}))
        eventually(lambda: drafting(one).get("alarm", False), 10, "the alarm is raised")
        told = warnings(one)
        assert len(told) == 1
        assert "acceptance of mtp drafts is too low" in told[0]
        assert "LOW ACCEPTANCE" in one.baton("status").stdout
