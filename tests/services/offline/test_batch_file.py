import json

import pytest

from baton.services.offline.batch_file import SHOWN_PROBLEMS, Output, check, read
from baton.services.offline.client import HttpResponse
from baton.services.offline.errors import InputError, RequestError

SERVED = ["baton-demo"]


def line(custom_id="1", **changed):
    body = {"model": "baton-demo", "prompt": "x"}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changed}


def write(path, *lines):
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def problems(tmp_path, *lines):
    with pytest.raises(InputError) as error:
        check(write(tmp_path / "in.jsonl", *lines), SERVED)
    return [one.strip() for one in str(error.value).splitlines()[1:]]


def test_a_good_file(tmp_path):
    chat = {"url": "/v1/chat/completions", "body": {"messages": []}}
    path = write(tmp_path / "in.jsonl", line("1"), "", line("2", **chat))
    assert check(path, SERVED) == {"1", "2"}
    assert [item.custom_id for item in read(path, skip=set())] == ["1", "2"]
    assert [item.custom_id for item in read(path, skip={"1"})] == ["2"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ({"custom_id": "1"}, "body and method and url missing"),
        (line(7), "custom_id 7 is not a string"),
        (line(method="GET"), "method 'GET' is not POST"),
        (line(url="/v1/completion"), "url '/v1/completion' is unknown; allowed: "),
        (line(url="/v1/embeddings"), "url '/v1/embeddings' is not served here"),
        (line(body="x"), "body 'x' is not a JSON object"),
        (line(body={}), "body has no 'prompt'"),
        (line(body={"prompt": "x", "stream": True}), "body sets stream"),
        (line(body={"prompt": "x", "model": "gpt"}), "model 'gpt' is not served"),
    ],
)
def test_invalid_lines_are_refused(tmp_path, wrong, said):
    (problem,) = problems(tmp_path, line("0"), wrong)
    assert problem.startswith(f"line 2: {said}")


def test_all_problems_are_reported_at_once(tmp_path):
    assert problems(tmp_path, line("a"), "{", line("b"), line("a")) == [
        "line 2: not a JSON object",
        "line 4: custom_id 'a' is also on line 1",
    ]
    many = problems(tmp_path, *["{"] * 30)
    assert (len(many), many[-1]) == (SHOWN_PROBLEMS + 1, "and 10 more")


def test_unreadable_and_empty_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="contains no request"):
        check(write(tmp_path / "empty.jsonl", ""), SERVED)
    with pytest.raises(InputError, match="cannot read"):
        check(tmp_path / "absent.jsonl", SERVED)


def test_format_of_results(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output.resume(path, {"1", "2", "3"}) as output:
        assert output.write("1", HttpResponse(200, {"id": "cmpl-7", "choices": []}))
        assert not output.write("2", HttpResponse(400, {"error": {"message": "no"}}))
        assert not output.write("3", RequestError("lost"))
    good, refused, lost = (json.loads(one) for one in path.read_text().splitlines())
    body = {"id": "cmpl-7", "choices": []}
    assert good["response"] == {"status_code": 200, "request_id": "cmpl-7", "body": body}
    assert refused["response"]["status_code"] == 400
    assert good["error"] is refused["error"] is lost["response"] is None
    assert lost["error"] == {"code": "request_failed", "message": "lost"}
    with Output.resume(path, {"1", "2", "3"}) as output:
        assert (output.done, output.failed) == ({"1", "2", "3"}, 2)


def test_a_file_cut_anywhere_is_resumed(tmp_path):
    """Whole lines are kept, wherever the writer was killed; the request of a torn line is repeated."""
    path = tmp_path / "out.jsonl"
    ids = {"1", "2", "ä"}
    with Output.resume(path, ids) as output:
        for custom_id in sorted(ids):
            output.write(custom_id, HttpResponse(200, {"text": "é\n"}))
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with Output.resume(path, ids) as output:
            assert len(output.done) == whole[:cut].count(b"\n")
            for custom_id in sorted(ids - output.done):
                output.write(custom_id, HttpResponse(200, {}))
        found = [json.loads(one)["custom_id"] for one in path.read_text().splitlines()]
        assert sorted(found) == sorted(ids)


def test_results_of_another_batch_are_not_touched(tmp_path):
    path = write(tmp_path / "out.jsonl", {"custom_id": "other", "response": None})
    before = path.read_bytes()
    with pytest.raises(InputError, match="line 1 belongs to none of these requests"):
        Output.resume(path, {"1"})
    assert path.read_bytes() == before
    path.write_text("no json\n")
    with pytest.raises(InputError, match="line 1"):
        Output.resume(path, {"1"})


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output.resume(path, {"1"}), pytest.raises(InputError, match="another batch writes"):
        Output.resume(path, {"1"})
    with Output.resume(path, {"1"}):
        pass  # another writer may open it now
