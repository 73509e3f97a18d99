"""vLLM's front-end arguments work in a router as in a vLLM server."""

import httpx
import pytest

from harness.deployment import MODEL_NAME, deployment
from harness.support import CALL_S, PATIENCE, ROOT

BEGIN, END = "<tool_response>", "</tool_response>"  # see reasoning_plugin.py
ENOUGH = f" That will do.{END}"  # forced when the budget ends
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "<|im_start|>assistant\n{{ opening }}"
)
PLUGIN = str(ROOT / "tests" / "e2e" / "reasoning_plugin.py")
FRONTEND = {
    "default_chat_template_kwargs": {"opening": "Well, "},
    "fingerprint-mode": "custom",
    "fingerprint_value": "ours",
    "enable_request_id_headers": True,
    "enable_tokenizer_info_endpoint": True,
    "enable_server_load_tracking": True,
    "enable_per_request_metrics": True,
    "disable_fastapi_docs": True,
    "allowed_origins": ["https://page.example"],
}
QUESTION = [{"role": "user", "content": "What is the capital of France? Think of it. " * 4}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """Start 1P1D with a reasoning parser, another chat template and many front-end arguments."""
    folder = tmp_path_factory.mktemp("frontend")
    (folder / "chat.jinja").write_text(TEMPLATE)
    marks = {"reasoning_end_str": ENOUGH}
    extra = {"reasoning_parser_plugin": PLUGIN, "reasoning_config": marks}
    engine = {"reasoning_parser": "demo", "extra": extra}
    router = {
        "chat_template": str(folder / "chat.jinja"),
        "frontend": {**FRONTEND, "enable_prompt_tokens_details": True, "enable_force_include_usage": True},
    }
    with deployment(folder, engine=engine, router=router) as one:
        yield one.up()


def ask(one, **more):
    options = {"max_tokens": 30, "temperature": 0, **more}
    return one.client().chat.completions.create(model=MODEL_NAME, messages=QUESTION, **options)


def test_the_template_and_its_defaults_make_the_prompt(thinking):
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}]}
    with httpx.Client(base_url=thinking.url, timeout=CALL_S) as http:
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        text = http.post("/detokenize", json={"model": MODEL_NAME, "tokens": tokens}).json()["prompt"]
    assert text == "<|im_start|>user: Hi<|im_end|>\n<|im_start|>assistant\nWell, "
    assert ask(thinking, max_tokens=1).usage.prompt_tokens > 2 * len(tokens)


def test_usage_shows_the_cached_tokens(thinking):
    ask(thinking)
    again = ask(thinking)
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    assert again.system_fingerprint == "ours"
    assert again.model_extra["metrics"]


def test_usage_comes_with_every_stream(thinking):
    chunks = list(ask(thinking, stream=True))
    assert chunks[-1].usage.completion_tokens > 0


@pytest.mark.parametrize("budget", [0, 5])
def test_thoughts_end_at_their_budget(thinking, budget):
    asked = {"chat_template_kwargs": {"opening": BEGIN}, "return_token_ids": True}
    asked["ignore_eos"] = True
    free = ask(thinking, extra_body=asked).choices[0]
    assert not free.message.content, "the demo model ended its thought"
    choice = ask(thinking, extra_body={**asked, "thinking_token_budget": budget}).choices[0]
    with httpx.Client(base_url=thinking.url, timeout=CALL_S) as http:
        mark = {"model": MODEL_NAME, "prompt": ENOUGH, "add_special_tokens": False}
        end = http.post("/tokenize", json=mark).json()["tokens"]
    assert choice.token_ids[:budget] == free.token_ids[:budget]
    assert choice.token_ids[budget : budget + len(end)] == end
    assert choice.message.content
    assert choice.message.reasoning.endswith(" That will do.")


def test_others_reach_vllms_app(thinking):
    with httpx.Client(base_url=thinking.url, timeout=CALL_S) as http:
        answer = http.get("/v1/models", headers={"Origin": "https://page.example", "X-Request-Id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert http.get("/tokenizer_info").json()["chat_template"]
        assert http.get("/load").json() == {"server_load": 0}
        assert http.get("/docs").status_code == 404


@pytest.mark.parametrize(
    ("command", "config", "line"),
    [
        (
            "router",
            {"router": {"frontend": {"enable_logdeltas": True}}},
            "router.frontend.enable_logdeltas: vLLM 0.32.0's front end has no such argument; "
            "did you mean enable_log_deltas or enable_log_outputs?",
        ),
        (
            "up",
            {"router": {"frontend": {"log_error_stack": "yes"}}},
            "router.frontend.log_error_stack (value 'yes'): true or false is needed",
        ),
        (
            "up",
            {"router": {"frontend": {"api-key": "x"}}},
            "router.frontend.api-key is not for you to set: use router.api_key",
        ),
        (
            "up",
            {"engine": {"extra": {"reasoning_parser_plugin": "/no.py"}}},
            "engine.extra.reasoning_parser_plugin: the file '/no.py' does not exist",
        ),
    ],
)
def test_a_problem_ends_the_start_with_one_line(tmp_path, command, config, line):
    with deployment(tmp_path, **config) as one:
        process = one.start(command, command)
        assert process.wait(60 * PATIENCE) == 1
        errors = [text for text in process.text.splitlines() if text.startswith("baton: error: ")]
        assert errors == [f"baton: error: {line}"]
        assert "Traceback" not in process.text
