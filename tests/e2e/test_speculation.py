"""Speculation with prefill and decode workers; test_same_answers.py tests that answers stay the same."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from harness.deployment import MODEL_NAME, deployment
from harness.support import CALL_S, ROOT, eventually

MTP_MODEL = ROOT / "deploy" / "demo-model" / "weights-mtp"


@pytest.mark.timeout(60)
def test_workers_differ_in_their_role_alone(one_pair):
    prefill, decode = (one_pair.workers(role)[0]["identity"]["capacity"] for role in ("prefill", "decode"))
    assert decode["lookahead_tokens"] == 5
    assert prefill == decode


@pytest.mark.timeout(240)
def test_sides_that_draft_differently_name_what_differs(tmp_path_factory):
    """A prefill worker without the drafter cannot provide the drafter's KV, so the pair is refused."""
    spec = '{"method": "mtp", "num_speculative_tokens": 2}'
    folder = tmp_path_factory.mktemp("mismatch")
    with deployment(folder, engine={"model": str(MTP_MODEL)}, router={"request_timeout_s": 20}) as one:
        one.start("scheduler", "scheduler")
        one.start("prefill", "prefill", "--speculative-config", "none")
        one.start("decode", "decode", "--speculative-config", spec)
        one.start("router", "router", "--speculative-config", spec)
        eventually(lambda: one.workers("prefill") and one.workers("decode"), 120, "both workers are ready")
        eventually(lambda: refused(one), 60, "the router names the difference")


def refused(one):
    """Return whether a request is refused because of the drafter."""
    body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 2}
    try:
        answer = httpx.post(f"{one.url}/v1/completions", json=body, timeout=CALL_S)
    except httpx.TransportError:
        return False  # the router is not up yet
    if answer.status_code == 200:
        return False  # one worker's heartbeat was late, so the other one covered for it
    assert answer.status_code == 503, answer.text
    return "speculative method: none on prefill, mtp on decode" in answer.text


@pytest.mark.timeout(120)
def test_named_tokens_beside_the_best_ones(one_pair):
    """Both kinds of log-probabilities work in shared batches, and no worker dies."""
    plain = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    bodies = [plain | {"logprobs": 1, "logprob_token_ids": [5]}, plain | {"logprobs": 3}]
    workers = {
        one["identity"]["worker_id"] for role in ("prefill", "decode") for one in one_pair.workers(role)
    }
    with httpx.Client(base_url=one_pair.url, timeout=CALL_S) as http, ThreadPoolExecutor(8) as pool:

        def ask(body):
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
            return answer["choices"][0]["logprobs"]["top_logprobs"]

        alone = [ask(body) for body in bodies]
        found = list(pool.map(ask, bodies * 4))
    assert [len(row) for row in alone[1]] == [3] * 60
    for rows, expected in zip(found, alone * 4, strict=True):
        for row, one in zip(rows, expected, strict=True):
            assert row == pytest.approx(one, abs=1e-3)
    assert workers == {
        one["identity"]["worker_id"] for role in ("prefill", "decode") for one in one_pair.workers(role)
    }
