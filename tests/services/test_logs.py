"""One line a record, for people or for machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from baton.services import logs


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    root, own = logging.getLogger(), logging.getLogger(logs.LOGGER)
    kept = (list(root.handlers), root.level, own.level)
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level = kept[0], kept[1]
    own.setLevel(kept[2])


def test_json_has_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "prefill-0").info("saved %d", 3, extra={"request": "r1"})
    line = json.loads(capsys.readouterr().err)
    assert (line["process"], line["level"], line["message"]) == ("prefill-0", "info", "saved 3")
    assert line["request"] == "r1"


def test_json_keeps_a_traceback_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logs.configure("json", "w")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("broke")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "ValueError" in json.loads(lines[0])["exception"]


def test_text_names_the_process_and_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "decode-1").info("ready", extra={"blocks": 7})
    text = capsys.readouterr().err
    assert "INFO [decode-1] baton: ready blocks=7" in text


def test_what_a_library_adds_to_every_record_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM does, once it is imported."""
    standard = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = standard(*args, **kwargs)
        record.process_kind = "main"
        return record

    logging.setLogRecordFactory(factory)
    try:
        logs.configure("text", "w").info("ready", extra={"blocks": 7})
    finally:
        logging.setLogRecordFactory(standard)
    assert capsys.readouterr().err.endswith("ready blocks=7\n")


def test_vllm_speaks_from_warning_on(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "w")
    logging.getLogger("vllm.engine").info("chatter")
    logging.getLogger("vllm.engine").warning("careful")
    text = capsys.readouterr().err
    assert "chatter" not in text
    assert text.count("careful") == 1
