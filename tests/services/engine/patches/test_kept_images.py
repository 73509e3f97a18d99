"""Images that the KV cache covers: sent to a single rank, dropped by an engine with several."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import NewRequestData

from baton.handoff.vllm.ec_connector import is_whole
from baton.services.engine.patches import kept_images, table
from tests.services.engine.test_images import feature

table.install()
ABSENT = ("sampling_params", "pooling_params", "lora_request", "prompt_embeds", "prompt_is_token_ids")


@pytest.mark.parametrize("several", [False, True])
def test_covered_images(monkeypatch, *, several):
    monkeypatch.setattr(kept_images, "several_ranks", several)
    request = SimpleNamespace(
        request_id="a",
        prompt_token_ids=[0] * 20,
        mm_features=[feature(0, 4), feature(10, 4)],
        num_computed_tokens=8,
        replay_start=0,
        **dict.fromkeys(ABSENT),
    )
    sent = NewRequestData.from_request(request, ([],), uses_mrope=True)
    whole = [[is_whole(one) for one in features] for features in (request.mm_features, sent.mm_features)]
    assert whole == [[not several, True]] * 2
