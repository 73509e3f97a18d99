import pytest

from baton.services.errors import ConfigError
from baton.services.offline.errors import RequestError
from baton.services.offline.pipeline import _load, fleet_of, pipeline
from baton.services.offline.prompts import (
    CHAT,
    COMPLETIONS,
    Request,
    Response,
    TokenLogprob,
    as_list,
    pieces,
    requests,
    response,
)

CHAT_PROMPT = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("given", "prompts", "single"),
    [
        ("Hello", ["Hello"], True),
        ([1, 2], [[1, 2]], True),
        (CHAT_PROMPT, [CHAT_PROMPT], True),
        ([], [], False),
        (["Hello"], ["Hello"], False),
        ([[1, 2], "x"], [[1, 2], "x"], False),
        ([CHAT_PROMPT, CHAT_PROMPT], [CHAT_PROMPT, CHAT_PROMPT], False),
        pytest.param((word for word in "ab"), ["a", "b"], False, id="a generator"),
    ],
    ids=str,
)
def test_one_prompt_or_several(given, prompts, single):
    assert as_list(given) == (prompts, single)


def test_requests_made_of_prompts():
    text, ids, chat = requests(["Hi", (1, 2), CHAT_PROMPT], "m", {"max_tokens": 3, "logprobs": 2})
    common = {"model": "m", "return_token_ids": True, "baton": {"usage": True}, "max_tokens": 3}
    assert text == Request(COMPLETIONS, {**common, "prompt": "Hi", "logprobs": 2})
    assert ids == Request(COMPLETIONS, {**common, "prompt": [1, 2], "logprobs": 2})
    assert chat == Request(CHAT, {**common, "messages": CHAT_PROMPT, "logprobs": True, "top_logprobs": 2})


def test_anything_else_goes_into_extra_body():
    (one,) = requests(["Hi"], "m", {"extra_body": {"echo": True}})
    assert one.body["echo"] is True
    assert "extra_body" not in one.body


def test_unknown_options_and_invalid_prompts():
    with pytest.raises(ConfigError, match="unknown option 'max_token'; did you mean 'max_tokens'"):
        requests(["Hi"], "m", {"max_token": 3})
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'; .* extra_body"):
        requests(["Hi"], "m", {"zzz": 3})
    with pytest.raises(ConfigError, match="prompt 1 is neither"):
        requests(["Hi", [1, "x"]], "m", {})


NO_DRAFTS = {"draft_steps": 0, "drafted_tokens": 0, "accepted_tokens": 0}


def test_both_formats_of_logprobs_become_one():
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "baton": NO_DRAFTS}
    listed = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5}]}
    tops = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    content = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": tops}]}
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop"}
    text = response(0, {"choices": [{**choice, "text": "a", "logprobs": listed}], "usage": usage})
    message = {"message": {"content": "a"}, "logprobs": content}
    chat = response(0, {"choices": [{**choice, **message}], "usage": usage})
    assert (text, text.logprobs) == (chat, [TokenLogprob("a", -0.5, {"a": -0.5, "b": -1.5})])


def test_draft_statistics():
    took = {"draft_steps": 3, "drafted_tokens": 9, "accepted_tokens": 6}
    got = response(0, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 9, "baton": took}})
    assert (got.draft_steps, got.drafted_tokens, got.accepted_tokens) == (3, 9, 6)


def test_empty_pieces_are_left_out():
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert pieces(0, {"choices": [role]}) == []
    assert [piece.finish_reason for piece in pieces(0, {"choices": [end]})] == ["stop"]


def test_a_response_that_failed_raises_where_it_is_used():
    failed = Response(0, error=RequestError("too long", 400))
    with pytest.raises(RequestError, match="too long"):
        _ = failed.text


def test_the_fleet():
    assert fleet_of(0, 0, None).roles == ["mixed"]
    assert fleet_of(1, 1, None).roles == ["prefill", "decode"]
    assert fleet_of(1, 1, 1).roles == ["prefill", "decode", "mixed"]


def test_the_settings():
    loaded = _load("folder", None, {"dtype": "float32", "handoff": {"staging_mib": 7}})
    assert (loaded.engine.model, loaded.engine.dtype, loaded.handoff.staging_mib) == ("folder", "float32", 7)
    for wrong, said in [
        ({"dtpye": "float32"}, "unknown key 'engine.dtpye'.*did you mean 'dtype'"),
        ({"router": {"port": 8000}}, "router.port cannot be set"),
        ({"handoff": 7}, "handoff is a section"),
    ]:
        with pytest.raises(ConfigError, match=said):
            _load("folder", None, wrong)


def test_errors_found_before_anything_starts():
    with pytest.raises(ConfigError, match="'/no/such/folder' does not exist"):
        pipeline("/no/such/folder")
    with pytest.raises(ConfigError, match="cannot serve"):
        pipeline("/no/such/folder", prefill=1)
