"""README's shell commands do what README says."""

import contextlib
import json
import re
import signal

import pytest

from baton.services.config import load
from baton.services.decode.proposers import validation
from harness.support import PATIENCE, ROOT, eventually
from tests.e2e.readme import reader, shell_blocks

ASK = "curl http://127.0.0.1:8000/v1/chat/completions"
STATUS = "source .venv/bin/activate"
DRAFTS = "baton up --model deploy/demo-model/weights-mtp"
PARTS = "baton scheduler &"
QUESTIONS = "baton status  "
BATCH = "baton batch in.jsonl out.jsonl"
RUN = (ASK, STATUS, DRAFTS, PARTS, QUESTIONS, BATCH)
NOT_RUN = ("make up", "make chaos", "baton ray")  # they take minutes and are covered by other tests

READY_S = 240.0
OWN_LINE = re.compile(r"[\d-]+ [\d:,]+ (INFO|WARNING) \[[\w.-]+\] baton\.")


def block(beginning):
    (found,) = [one for one in shell_blocks() if one.startswith(beginning)]
    return found


def test_every_block_is_run_or_named_as_not():
    for one in shell_blocks():
        assert sum(one.startswith(known) for known in (*RUN, *NOT_RUN)) == 1, f"no test runs this:\n{one}"
    for known in (*RUN, *NOT_RUN):
        assert block(known)


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with reader(tmp_path_factory.mktemp("readme")) as one:
        yield one


def headings(text):
    """Return the table heads that `baton status` prints, without padding."""
    lines = [line.strip() for line in text.splitlines()]
    rules = [number for number, line in enumerate(lines) if line and set(line) == {"─"}]
    return [" ".join(f"{lines[at - 2]} {lines[at - 1]}".split()) for at in rules]


@pytest.mark.timeout(600)
def test_the_parts_one_by_one(person):
    started = {}
    for arguments in person.commands(block(PARTS)):
        started[arguments[0]] = person.start(arguments)
    assert set(started) == {"scheduler", "prefill", "decode", "router"}

    def ready():
        assert all(one.poll() is None for one in started.values()), [one.text for one in started.values()]
        with contextlib.suppress(AssertionError):
            person.shell("curl -fsS http://127.0.0.1:8000/health")
            return all("ready on" in started[role].text for role in ("prefill", "decode"))
        return False

    eventually(ready, READY_S, "all parts are ready", 0.2)
    answer = json.loads(person.shell(block(ASK)))
    assert answer["model"] == "baton-demo"
    assert answer["choices"][0]["message"]["content"]

    def status():
        told = person.shell(block(STATUS))
        return told if len(headings(told)) == 3 else ""

    told = eventually(status, READY_S, "the handoff is reported too")
    assert "model baton-demo" in told
    for role in ("prefill", "decode"):
        assert re.search(rf"^ {role}-\S+ +{role} +ready ", told, re.MULTILINE), told

    assert headings(told) == headings((ROOT / "README.md").read_text())

    asked, undrain = re.split(r"^(?=baton undrain)", block(QUESTIONS), flags=re.MULTILINE)
    told = person.shell(asked)
    assert re.search(r"^decode-\S+ is a mixed worker now", told, re.MULTILINE), told
    assert re.search(r"^decode-\S+ is draining: ", told, re.MULTILINE), told
    # The drain takes effect with the worker's next heartbeat; an undrain before that would cancel it.
    assert started["decode"].wait(60 * PATIENCE) == 0
    assert re.search(r"^decode-\S+ takes requests again", person.shell(undrain), re.MULTILINE)

    for name in ("scheduler", "prefill", "decode", "router"):
        for line in started[name].text.splitlines():
            assert OWN_LINE.match(line), f"{name} prints a line that is not Baton's: {line}"
    for name in ("router", "prefill", "scheduler"):
        started[name].terminate()
        assert started[name].wait(60 * PATIENCE) == 0


@pytest.mark.timeout(600)
def test_each_way_of_drafting(person):
    commands = person.commands(block(DRAFTS))
    methods = [json.loads(arguments[-1])["method"] for arguments in commands]
    assert methods == ["mtp", "ngram", "mtp"]
    for arguments, method in zip(commands, methods, strict=True):
        model, drafts = arguments[arguments.index("--model") + 1], json.loads(arguments[-1])
        settings = load({"engine": {"model": str(ROOT / model), "speculative_config": drafts}})
        found = validation.check(settings.engine)
        assert found is not None
        assert found.name == method

    process = person.start(commands[-1])

    def begun():
        assert process.poll() is None, process.text
        return "Ready." in process.text

    eventually(begun, READY_S, f"ready: {commands[-1]}")
    told = json.loads(person.shell("baton status --json"))
    served = [one["identity"]["capacity"]["speculative_method"] for one in told["workers"]]
    assert len(served) == 2
    assert all(one.startswith(methods[-1]) for one in served)
    process.send_signal(signal.SIGINT)
    assert process.wait(60 * PATIENCE) == 0


@pytest.mark.timeout(600)
def test_a_batch(person):
    request = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "baton-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    }
    (person.folder / "in.jsonl").write_text(json.dumps(request) + "\n")
    (command,) = person.commands(block(BATCH))
    process = person.start(command)
    assert process.wait(READY_S) == 0, process.text
    (answer,) = [json.loads(line) for line in (person.folder / "out.jsonl").read_text().splitlines()]
    assert answer["custom_id"] == "one"
    assert answer["response"]["status_code"] == 200
