"""Logs of one line per record, for people or for machines."""

import asyncio
import json
import logging
import warnings

import pytest

from baton.levels import set_level
from baton.services import logs
from baton.services.errors import ConfigError


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    verbosities = ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "TORCH_CPP_LOG_LEVEL")
    for name in ("_BATON_LOG", "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", *verbosities):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    logging.getLogger("baton.requests").setLevel(logging.NOTSET)


def test_json_has_the_fields(capsys):
    logs.configure("json", "prefill-0").info("saved %d", 3, extra={"request": "r1"})
    line = json.loads(capsys.readouterr().err)
    assert (line["process"], line["level"], line["message"]) == ("prefill-0", "info", "saved 3")
    assert line["request"] == "r1"


def test_json_keeps_a_traceback_on_its_line(capsys):
    logger = logs.configure("json", "w")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("broke")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "ValueError" in json.loads(lines[0])["exception"]


def test_text_names_the_process_and_the_fields(capsys):
    logs.configure("text", "decode-1").info("ready", extra={"blocks": 7})
    text = capsys.readouterr().err
    assert "INFO [decode-1] baton: ready blocks=7" in text


def test_fields_that_a_library_adds_to_every_record_are_left_out(capsys):
    """Replace the record factory, as vLLM does when it is imported."""
    standard = logging.getLogRecordFactory()

    def factory(*args, **kwargs):
        record = standard(*args, **kwargs)
        record.process_kind = "main"
        return record

    logging.setLogRecordFactory(factory)
    try:
        logs.configure("text", "w").info("ready", extra={"blocks": 7})
    finally:
        logging.setLogRecordFactory(standard)
    assert capsys.readouterr().err.endswith("ready blocks=7\n")


async def test_lines_of_a_task_say_what_they_are_about(capsys):
    """So do lines of the tasks that it starts, but no others."""
    log = logs.configure("json", "router")

    async def relay():
        logs.concern(request_id="r1")
        log.warning("inner")

    async def request():
        logs.concern(trace_id="t1")
        await asyncio.create_task(relay())
        log.warning("outer")
        log.warning("own", extra={"trace_id": "t2"})

    await asyncio.create_task(request())
    log.warning("none")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    shown = [(line["message"], line.get("request_id"), line.get("trace_id")) for line in lines]
    assert shown == [("inner", "r1", "t1"), ("outer", None, "t1"), ("own", None, "t2"), ("none", None, None)]


def test_levels_change_while_it_runs(capsys):
    log = logs.configure("text", "w")
    set_level("debug")
    log.debug("fine")
    logging.getLogger("vllm.engine").info("a library's")
    set_level("error")
    set_level("")
    set_level("error")  # logged once
    log.warning("hidden")
    with pytest.raises(ValueError, match="'chatty' is no log level: use debug, info, warning, error"):
        set_level("chatty")
    text = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    said = "the log level is {} now, as an operator asked"
    assert text == [said.format("debug"), "fine", said.format("error")]


def speak():
    """Log like libraries: once at each level, and one Python warning."""
    for name in ("vllm.engine", "transformers.modeling", "some.other.library"):
        for level in ("info", "warning", "error"):
            getattr(logging.getLogger(name), level)("%s from %s", level, name)
    warnings.warn("reduce_op is deprecated", FutureWarning, stacklevel=1)


@pytest.mark.filterwarnings("always")
def test_errors_of_libraries_are_shown(capsys):
    logs.configure("text", "w").info("ours")
    speak()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "ours",
        "error from vllm.engine",
        "error from transformers.modeling",
        "error from some.other.library",
    ]


@pytest.mark.filterwarnings("always")
def test_a_log_file_keeps_their_warnings(capsys):
    logs.keep_warnings()
    logs.configure("text", "w")
    speak()
    text = capsys.readouterr().err
    for name in ("vllm.engine", "transformers.modeling", "some.other.library"):
        assert text.count(f"warning from {name}") == 1
        assert text.count(f"error from {name}") == 1
    assert "reduce_op is deprecated" in text
    assert "info from" not in text


@pytest.mark.filterwarnings("always")
def test_the_environment_sets_the_level_of_libraries(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "info")
    logs.keep_warnings()
    logs.configure("text", "w")
    speak()
    assert "info from vllm.engine" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "chatty")
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL: value 'chatty' is not allowed"):
        logs.configure("text", "w")


def test_a_spawned_process_logs_as_its_parent(capsys):
    logs.configure("json", "decode-1")
    logging.getLogger().handlers.clear()  # a new interpreter with the same environment has none
    logs.follow()
    logging.getLogger("vllm.rank").error("broke")
    assert json.loads(capsys.readouterr().err)["process"] == "decode-1"
