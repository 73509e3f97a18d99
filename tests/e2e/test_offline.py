"""Offline use with real engines: the same answers in every mode, and nothing lost or left running."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import openai
import pytest

from baton import pipeline
from baton.services.offline.errors import DeploymentEnded
from harness import zygote
from harness.deployment import ENGINE, MODEL_NAME
from harness.support import CALL_S, PATIENCE, eventually, family, gone

MODEL = ENGINE["model"]
SETTINGS = {key: value for key, value in ENGINE.items() if key != "model"}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["def main(", [5, 6, 7, 8, 9], CHAT, "Once upon a time " * 20, *(["import os"] * 4)]
LINES = 128  # lines of a batch
FLAGS = [
    *("--model", str(MODEL), "--dtype", "float32", "--served-model-name", MODEL_NAME),
    *("--max-model-len", "1024", "--kv-cache-gib", "0.25", "--max-num-seqs", "8"),
]
GREEDY = {"max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def pair():
    with pipeline(MODEL, prefill=1, decode=1, **SETTINGS) as pipe:
        yield pipe
        everything = family(pipe.deployment.pid)
        logs = pipe.deployment.log_dir
    assert gone(everything)
    assert not logs.exists()
    with pytest.raises(DeploymentEnded, match="closed"):
        pipe("Hello")


@pytest.mark.timeout(180)
def test_answers_come_in_the_order_of_their_prompts(pair):
    answers = pair(PROMPTS, **GREEDY)
    assert [one.index for one in answers] == list(range(len(PROMPTS)))
    assert answers[2].text == "The capital of France is Paris."
    assert {one.completion_tokens for one in answers[3:]} == {16}


@pytest.mark.timeout(180)
def test_the_same_answers_over_http(pair):
    own = pair.deployment
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key=own.api_key, timeout=CALL_S) as client:
        chat = client.chat.completions.create(model=MODEL_NAME, messages=CHAT, **GREEDY)
        text = client.completions.create(model=MODEL_NAME, prompt="def main(", **GREEDY)
    assert pair(CHAT, **GREEDY).text == chat.choices[0].message.content
    assert pair("def main(", **GREEDY).text == text.choices[0].text
    with (
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="another", timeout=CALL_S) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.completions.create(model=MODEL_NAME, prompt="x")


@pytest.mark.timeout(180)
def test_a_stream_is_the_same_in_pieces(pair):
    tokens = defaultdict(list)
    texts = defaultdict(str)
    ends = Counter[str]()
    for piece in pair.stream(PROMPTS, **GREEDY):
        tokens[piece.index] += piece.token_ids
        texts[piece.index] += piece.text
        ends.update([piece.finish_reason] if piece.finish_reason else [])
    whole = pair(PROMPTS, **GREEDY)
    assert [tokens[one.index] for one in whole] == [one.token_ids for one in whole]
    assert [texts[one.index] for one in whole] == [one.text for one in whole]
    assert ends == Counter(one.finish_reason for one in whole)


@pytest.mark.timeout(180)
def test_a_prompt_that_fails_is_alone(pair):
    good, wrong, last = pair(["def main(", "x " * 3000, "import"], **GREEDY)
    assert good.text
    assert last.text
    assert wrong.error is not None
    assert wrong.error.status == 400
    assert "maximum context length" in str(wrong.error)


@pytest.mark.timeout(180)
def test_several_answers_with_logprobs(pair):
    one = pair(CHAT, n=2, temperature=1, seed=7, logprobs=2, max_tokens=5)
    assert len(one.choices) == 2
    assert one.completion_tokens == sum(len(choice.token_ids) for choice in one.choices)
    for choice in one.choices:
        assert choice.logprobs is not None
        assert [len(token.top) >= 2 for token in choice.logprobs] == [True] * len(choice.token_ids)


def line(number, prompt):
    """Return a batch's request."""
    path, asked = ("chat/completions", "messages") if prompt is CHAT else ("completions", "prompt")
    body = {asked: prompt, "ignore_eos": True, **GREEDY}
    one = {"custom_id": f"{number}", "method": "POST", "url": f"/v1/{path}", "body": body}
    return json.dumps(one) + "\n"


@pytest.fixture
def ctrl_c_interrupts():
    """Handle SIGINT even if the shell that started pytest ignored it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_ends_the_requests_alone(pair):
    endless = {"max_tokens": 1000, "ignore_eos": True}
    first = next(iter(pair.stream("def main(", **endless)))  # leaving the loop
    assert first.token_ids
    interrupt = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (elsewhere it would end pytest)
        interrupt.start()
        pair(["def main("] * 64, **endless)
    assert time.monotonic() - began < 10 * PATIENCE
    interrupt.join()
    assert pair(CHAT, **GREEDY).text == "The capital of France is Paris."


@pytest.mark.timeout(180)
def test_a_killed_batch_loses_and_doubles_nothing(pair, tmp_path):
    """A killed batch's deployment ends with it, and `pair` answers the remaining requests in the same way."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(line(number, PROMPTS[number % len(PROMPTS)]) for number in range(LINES)))
    command = ["batch", str(requests), str(answers)]
    process = zygote.shared().baton(
        "batch", [*command, *FLAGS, "--log-dir", str(tmp_path / "logs")], tmp_path
    )
    try:

        def some():
            assert process.poll() is None, process.text
            return answers.exists() and answers.read_bytes().count(b"\n") >= 8

        eventually(some, 120, "some are answered", 0.01)
        everything = family(process.pid)
    finally:
        process.kill()
        process.wait(10)
    assert len(everything) >= 6  # itself, supervisor, scheduler, worker, router, watcher
    eventually(lambda: gone(everything), 20, f"all of {everything} have ended")
    before = answers.read_bytes()
    assert before.count(b"\n") < LINES
    own = pair.deployment
    there = ["--url", own.url, "--api-key", own.api_key]
    again = zygote.shared().baton("again", [*command, *there], tmp_path)
    assert again.wait(CALL_S) == 0, again.text
    assert answers.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    texts = defaultdict(set)
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    for one in found:
        choice = one["response"]["body"]["choices"][0]
        told = choice["message"]["content"] if "message" in choice else choice["text"]
        texts[int(one["custom_id"]) % len(PROMPTS)].add(told)
    assert sorted(int(one["custom_id"]) for one in found) == list(range(LINES))
    assert [len(of) for _, of in sorted(texts.items())] == [1] * len(PROMPTS)


@pytest.mark.timeout(180)
def test_an_engine_that_cannot_start_says_why(tmp_path):
    (tmp_path / "in.jsonl").write_text(line(0, "x"))
    command = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *FLAGS]
    process = zygote.shared().baton("batch", [*command, "--kv-cache-gib", "0.001"], tmp_path)
    assert process.wait(CALL_S) == 1, process.text
    said = process.text.splitlines()[-1]
    assert re.match(r"baton: error: mixed-0 could not start: .*KV cache", said)
    log = Path(said.rpartition("(log: ")[2].removesuffix(")"))
    assert "KV cache" in log.read_text()
    shutil.rmtree(log.parent)
