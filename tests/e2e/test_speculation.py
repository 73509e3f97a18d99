"""Speculation through prefill and decode workers: sides that do not fit are refused by name.

test_same_answers.py tests that answers stay the same.
"""

from __future__ import annotations

import httpx
import pytest

from harness.deployment import MODEL_NAME, Deployment, deployment
from harness.support import CALL_S, ROOT, eventually

MTP_MODEL = ROOT / "deploy" / "demo-model" / "weights-mtp"


@pytest.mark.timeout(60)
def test_workers_differ_in_their_role_alone(one_pair: Deployment) -> None:
    prefill, decode = (one_pair.workers(role)[0]["identity"]["capacity"] for role in ("prefill", "decode"))
    assert decode["lookahead_tokens"] == 5
    assert prefill == decode


@pytest.mark.timeout(240)
def test_sides_that_draft_differently_name_what_differs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A prefill worker without the drafter has none of its KV: such a cache would silence the drafts."""
    spec = '{"method": "mtp", "num_speculative_tokens": 2}'
    folder = tmp_path_factory.mktemp("mismatch")
    with deployment(folder, engine={"model": str(MTP_MODEL)}, router={"request_timeout_s": 20}) as one:
        one.start("scheduler", "scheduler")
        one.start("prefill", "prefill", "--speculative-config", "none")
        one.start("decode", "decode", "--speculative-config", spec)
        one.start("router", "router", "--speculative-config", spec)
        eventually(lambda: one.workers("prefill") and one.workers("decode"), 120, "both workers are ready")
        eventually(lambda: refused(one), 60, "the router names the difference")


def refused(one: Deployment) -> bool:
    """Tell whether a request is refused, as it has to be, because of the drafter."""
    body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 2}
    try:
        answer = httpx.post(f"{one.url}/v1/completions", json=body, timeout=CALL_S)
    except httpx.TransportError:
        return False  # the router is not there yet
    if answer.status_code == 200:
        return False  # one of them was late with its heartbeat: the other one covered for it
    assert answer.status_code == 503, answer.text
    return "speculative method: none on prefill, mtp on decode" in answer.text
