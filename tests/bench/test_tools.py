"""The load tools of other projects: their environment, failures and questions."""

import json

from bench import tools
from bench.prompts import questions


def test_a_tool_sees_no_package_of_ours_and_its_failure_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert tools.command(["sh", "-c", 'test -z "$PYTHONPATH" -a "$HF_HUB_OFFLINE" = 1'], tmp_path, 30) == ""
    failure = tools.command(["sh", "-c", "echo why; exit 3"], tmp_path, 30)
    assert failure == "sh ended with 3:\nwhy\n"


def test_a_single_different_answer_changes_the_checksum():
    likeliest = {"filtered_resps": [["-9.5", "False"], ["-0.2", "True"], ["-100.0", "False"]]}
    assert tools.answer(likeliest) == "1"
    assert tools.answer({"filtered_resps": ["873 981"]}) == "873 981"


def test_no_answer_stands_twice_among_the_choices(tmp_path):
    asked = questions(tools.QUESTIONS)
    assert len({answer for _, answer in asked}) == len(asked) == tools.QUESTIONS
    tools.task("one", "multiple_choice", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert len(lines) == tools.QUESTIONS
    for line, (prompt, answer) in zip(lines, asked, strict=True):
        assert (line["prompt"], line["choices"][line["right"]]) == (prompt, answer)
        assert len(set(line["choices"])) == tools.CHOICES
    assert {line["right"] for line in lines} == set(range(tools.CHOICES))
