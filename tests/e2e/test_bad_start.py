"""Starts that must fail: they print one clear line and return a non-zero status within seconds."""

import json
import re
import shutil
import socket

import pytest
import yaml

from baton.services.engine.args import VLLM_VERSION
from harness import zygote
from harness.deployment import MODEL, deployment
from harness.scheduling import RedisServer
from harness.support import BATON, CALL_S, ROOT, eventually, free_port, listening, ran

A_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ INFO \[")  # a worker logs its progress before it fails


def fails(*command):
    """Run `baton COMMAND`, which must fail with one line on stderr and nothing on stdout. Return the line."""
    done = ran(BATON, *command, cwd=ROOT)
    assert done.returncode == 1, done
    assert not done.stdout
    return the_line(done.stderr)


def fails_forked(folder, *command, **more):
    """Do the same in a process that has already imported vLLM."""
    process = zygote.shared().baton("wrong", list(command), folder, **more)
    assert process.wait(CALL_S) == 1, process.text
    return the_line(process.text)


def the_line(said):
    lines = [line for line in said.splitlines() if not A_LOG_LINE.match(line)]
    assert len(lines) == 1, said
    assert lines[0].startswith("baton: error: "), said
    for noise in ("validation error", "Value error", "pydantic", "ValueError", "gpu_memory", "VLLM_CPU"):
        assert noise not in lines[0]
    return lines[0]


def worker(command, *more, scheduler=""):
    address = scheduler or f"127.0.0.1:{free_port()}"
    return [command, "--model", str(MODEL), "--dtype", "float32", "--scheduler", address, *more]


def test_a_folder_that_is_no_model(tmp_path):
    assert "no config.json" in fails_forked(tmp_path, "decode", "--model", str(tmp_path))


@pytest.mark.parametrize("command", ["up", "router", "scheduler", "decode", "status"])
def test_a_wrong_yaml_key(command, tmp_path):
    config = tmp_path / "baton.yaml"
    config.write_text(yaml.safe_dump({"router": {"prot": 8000}}))
    said = fails_forked(tmp_path, command, "--config", str(config))
    assert "unknown key 'router.prot'; did you mean 'port'?" in said


def test_a_cold_command_that_asks_others_fails_in_the_same_way(tmp_path):
    assert "'/nowhere.yaml' does not exist" in fails("status", "--config", "/nowhere.yaml")


@pytest.fixture(scope="module")
def somewhere(tmp_path_factory):
    """Return the address of a scheduler for workers that fail after they reach it."""
    with deployment(tmp_path_factory.mktemp("somewhere")) as one:
        one.start("scheduler", "scheduler")
        eventually(lambda: listening(one.scheduler_port), 60, "the scheduler listens")
        yield one.scheduler_address


def test_nothing_is_printed_after_the_line():
    """Start cold: on a normal exit of the interpreter, libraries would report leaks."""
    said = fails(*worker("router", "--port", str(free_port()), "--tool-call-parser", "nope"))
    assert "engine.tool_call_parser: vLLM has no parser 'nope'" in said


def test_an_engine_argument_that_a_router_refuses(tmp_path):
    """tests/services/engine/test_refusals.py has more of vLLM's refusals."""
    wrong = json.dumps({"tokenizer_mode": "nope"})
    line = worker("router", "--port", str(free_port()), "--engine-args", wrong)
    said = "No tokenizer registered for engine.extra.tokenizer_mode='nope'"
    assert said in fails_forked(tmp_path, *line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--kv-cache-gib", "0.001"],
            "raise engine.kv_cache_gib (--kv-cache-gib), or lower engine.max_model",
        ),
        (["--kv-cache-gib", "100000"], "lower --kv-cache-gib, or end what uses the memory"),
        (["--engine-args", '{"block_size": 7}'], "engine.extra.block_size (value 7): set a multiple of 32"),
        (["--engine-args", '{"load_format": "nope"}'], "Load format `nope` is not supported"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_an_engine_refuses_while_it_loads(tmp_path, somewhere, arguments, said):
    assert said in fails_forked(tmp_path, *worker("mixed", *arguments, scheduler=somewhere))


def test_a_model_without_weights(tmp_path, somewhere):
    model = shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    line = ["mixed", "--model", str(model), "--dtype", "float32", "--scheduler", somewhere]
    assert "holds no weights (*.safetensors)" in fails_forked(tmp_path, *line)


@pytest.mark.parametrize("command", ["up", "router", "scheduler", "mixed"])
def test_a_taken_port(tmp_path, command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = {
            "up": ["up", "--model", str(MODEL), "--port", str(port)],
            "router": worker("router", "--port", str(port)),
            "scheduler": ["scheduler", "--scheduler", f"127.0.0.1:{port}"],
            "mixed": worker("mixed", "--listen", f"127.0.0.1:{port}"),
        }[command]
        said = fails_forked(tmp_path, *arguments)
    assert f"127.0.0.1:{port}" in said


def test_a_scheduler_that_is_not_there(tmp_path):
    constants = {"baton.services.worker.process:SCHEDULER_WAIT_S": 0.5}
    said = fails_forked(tmp_path, *worker("mixed", scheduler="127.0.0.1:9"), constants=constants)
    assert "127.0.0.1:9" in said
    assert "scheduler" in said


def test_redis_that_refuses(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with RedisServer(tmp_path, password="secret") as redis:
        store = redis.url.replace("secret", "wrong")
        refused = fails_forked(tmp_path, "scheduler", "--scheduler", address, "--store", store)
    assert "password" in refused
    assert "wrong" not in refused.replace("wrong password", "").replace("password is wrong", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("status --scheduler 127.0.0.1:9", "does not answer"),
        ("drain w --scheduler 127.0.0.1:9", "does not answer"),
        ("role w decode --scheduler 127.0.0.1:9", "does not answer"),
        ("role w cook", "there is no role 'cook'; allowed: prefill, decode, mixed"),
        ("status --scheduler nope", "scheduler.address: value 'nope' is not allowed: give host:port"),
        ("status --config /nowhere.yaml", "'/nowhere.yaml' does not exist; pass an existing file"),
        ("status --config {bad}", "is not valid YAML: line 2, column 5: expected the node content"),
        ("status --config {list}", "must be a mapping of sections"),
        ("up --config {list} --model {model}", "must be a mapping of sections"),
        *((f"{part} --model /nowhere", "'/nowhere' does not exist") for part in ("up", "router", "prefill")),
        ("up", "engine.model is not set"),
        ("scheduler --store mysql://x", "store"),
        ("up --model {model} --scheduler 127.0.0.1:99999", "give host:port, with a port up to 65535"),
        ("up --model {model} --scheduler localhost:", "scheduler.address: value 'localhost:'"),
        ("up --model {model} --port 99999", "router.port: value 99999 is not allowed"),
        ("up --model {model} --port 0", "router.port: port 0 is not allowed here"),
        ("up --model {model} --prefill 0", "start at least one prefill and one decode worker, or --mixed 1"),
        ("up --model {model} --dtype int3", "engine.dtype: value 'int3' is not allowed"),
        ("up --model {model} --engine-args nope", "--engine-args: the value is not valid JSON"),
        ("up --model {model} --engine-args [1]", "engine.extra is not allowed: Input should be"),
        ("up --model {model} --handoff-transports pigeon", "handoff.transports.0: value 'pigeon'"),
        ("router --model {model} --scheduler nope", "scheduler.address: value 'nope'"),
        ("scheduler --store redis://h:port", "scheduler.store is not a Redis URL: it must look like"),
        *(
            (f"{part} --scheduler a:7400,b:7400", "so each would have drains and orders of its own: set")
            for part in (
                "up --model {model}",
                "scheduler",
                "decode --model {model}",
                "router --model {model}",
            )
        ),
        ("up --model {model} --schedulers 2", "--schedulers is 2 and scheduler.store is memory, so"),
        ("status --scheduler 127.0.0.1:9,127.0.0.1:8", "does not answer"),
        ("scheduler --heartbeat-s 1", "scheduler.heartbeat_s is no longer set: it is a fifth of"),
        ("prefill --model {model} --listen nope", "worker.listen: value 'nope'"),
        (
            "batch {bad} out.jsonl --model {model} --url nonsense",
            "--url nonsense: give it as http://HOST:PORT",
        ),
        ("batch {bad} out.jsonl", "engine.model is not set"),
    ],
)
def test_what_is_seen_before_anything_starts(tmp_path, line, said):
    (tmp_path / "bad.yaml").write_text("a: [1,\n b: }")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    files = {"bad": tmp_path / "bad.yaml", "list": tmp_path / "list.yaml", "model": MODEL}
    assert said in fails_forked(tmp_path, *(word.format(**files) for word in line.split()))


def test_a_log_folder_that_cannot_be(tmp_path):
    port, scheduler = str(free_port()), f"127.0.0.1:{free_port()}"
    line = worker("up", "--port", port, "--log-dir", "/proc/nowhere", scheduler=scheduler)
    assert "--log-dir /proc/nowhere: cannot write there" in fails_forked(tmp_path, *line)


def test_wrong_values_in_the_environment(tmp_path):
    wrong = {"BATON_ENGINE__EXTRA": "{nope"}
    assert "is not valid JSON" in fails_forked(tmp_path, "up", "--model", str(MODEL), environment=wrong)
    loud = {"VLLM_LOGGING_LEVEL": "loud"}
    assert "use ERROR, WARNING" in fails_forked(tmp_path / "loud", "scheduler", environment=loud)


@pytest.mark.parametrize("line", ["drain", "status --scheduler", "up --prefill -1", "up --modle x", "nope"])
def test_a_command_line_that_is_none(tmp_path, line):
    """Typer prints the usage and one line with the error."""
    process = zygote.shared().baton("wrong", line.split(), tmp_path)
    assert process.wait(CALL_S) == 2
    assert process.text.splitlines()[-1].startswith("Error: ")
    assert process.text.count("Error") == 1
    assert "Value error" not in process.text


@pytest.mark.timeout(180)
def test_another_model_is_refused_by_name(tmp_path):
    """A worker that does not fit the deployment fails in seconds, before it loads anything."""
    with deployment(tmp_path / "one") as one:
        one.start("scheduler", "scheduler")
        one.start("mixed", "mixed")
        eventually(lambda: one.workers("mixed"), 90, "the first worker is ready")
        said = fails_forked(tmp_path, "mixed", "--model", str(MODEL), "--scheduler", one.scheduler_address)
        assert "'weights' here, 'baton-demo'" in said
        assert "worker mixed-" in said  # the running worker


@pytest.mark.parametrize("command", ["router", "decode"])
def test_another_vllm_installed_is_refused(tmp_path, command):
    another = {"baton.services.engine.args:VLLM_VERSION": "0.99.0"}
    said = fails_forked(tmp_path, *worker(command), constants=another)
    assert "0.99.0" in said
    assert VLLM_VERSION in said


def test_speculation_that_cannot_work_in_a_cold_start():
    """Such a start fails before vLLM is imported."""
    assert "has no MTP layers" in fails(*worker("mixed", "--speculative-config", '{"method": "mtp"}'))


@pytest.mark.parametrize(
    ("command", "spec", "said"),
    [
        ("up", '{"method": "mpt"}', "there is no speculative method 'mpt'; did you mean 'mtp'?"),
        ("up", '{"method": "eagle3", "model": "/nowhere"}', "'/nowhere'): this folder does not exist"),
        ("up", '{"method": "ngram"', "--speculative-config: value"),
        *((command, '{"method": "mtp"}', "has no MTP layers") for command in ("up", "prefill", "decode")),
    ],
)
def test_speculation_that_cannot_work(tmp_path, command, spec, said):
    assert said in fails_forked(tmp_path, *worker(command, "--speculative-config", spec))


def test_vllms_own_key_for_speculation(tmp_path):
    spec = '{"speculative_config": {"method": "ngram"}}'
    assert "--speculative-config" in fails_forked(tmp_path, *worker("router", "--engine-args", spec))
