"""The command `baton batch` as a process: exit statuses, and resuming after it was stopped."""

import asyncio
import json
import signal
from asyncio.subprocess import PIPE

import pytest

from baton.services.cli.batch import _key
from baton.services.config import load
from harness import zygote
from harness.support import BATON, IGNORING, PATIENCE, full_pipe


def write(path, *prompts):
    lines = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(requests):
    return requests.with_name("out.jsonl")


def command(served, requests, *more):
    return "batch", str(requests), str(answers(requests)), "--url", f"{served.url}/v1", *more


async def start(served, requests, *more, by=(), out=PIPE):
    words = [*by, str(BATON), *command(served, requests, *more)]
    return await asyncio.create_subprocess_exec(*words, stderr=out)


async def end(process):
    async with asyncio.timeout(30 * PATIENCE):
        _, said = await process.communicate()
    return process.returncode or 0, (said or b"").decode()


async def run(served, requests, *more):
    done = await asyncio.to_thread(zygote.shared().command, *command(served, requests, *more))
    return done.returncode, done.stderr


def answered(requests):
    return sorted(json.loads(line)["custom_id"] for line in answers(requests).read_text().splitlines())


async def test_all_good(served, tmp_path):
    prompts = [f"word-{number}" for number in range(200)]
    requests = write(tmp_path / "in.jsonl", *prompts)
    status, said = await run(served, requests, "--api-key", "own")
    assert (status, served.keys) == (0, {"Bearer own"}), said
    assert "200 done, 0 of them failed" in said
    assert answered(requests) == sorted(prompts)
    assert served.most <= 64


async def test_a_failed_request_leaves_the_others_alone(served, tmp_path):
    requests = write(tmp_path / "in.jsonl", "a", "bad", "full", "broken", "b")
    status, said = await run(served, requests)
    assert status == 1
    assert "5 done, 2 of them failed" in said
    assert answered(requests) == ["a", "b", "bad", "broken", "full"]
    seen = served.seen.total()
    status, said = await run(served, requests)
    assert status == 1
    assert "nothing left to do" in said
    assert served.seen.total() == seen


def test_source_of_the_api_key(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text("# new\nof-the-file\nolder\n")
    monkeypatch.setenv("VLLM_API_KEY", "of-vllm")
    settings = load({"router": {"api_key": f"file:{keys}"}})
    assert _key("own", settings) == "own"
    assert _key(f"file:{keys}", load()) == _key("", settings) == "of-the-file"
    assert _key("", load()) == "of-vllm"


async def test_bad_input_starts_nothing(served, tmp_path):
    requests = write(tmp_path / "in.jsonl", "a", "a")
    status, said = await run(served, requests)
    assert status == 2
    assert "line 2: custom_id 'a' is also on line 1" in said
    assert not answers(requests).exists()
    assert not served.seen


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name
)
async def test_a_stopped_batch_is_resumed(served, tmp_path, how):
    quick = [f"word-{number}" for number in range(50)]
    slow = [f"held-{number}" for number in range(8)]
    requests = write(tmp_path / "in.jsonl", *quick, *slow, *(f"more-{number}" for number in range(50)))
    served.crowd = len(slow)
    process = await start(served, requests, "--concurrency", str(len(slow)), by=IGNORING)
    async with asyncio.timeout(30 * PATIENCE):
        await served.crowded.wait()  # only slow requests are in flight
    process.send_signal(how)
    status, said = await end(process)
    assert status == (-9 if how is signal.SIGKILL else 130), said
    assert answered(requests) == sorted(quick)
    if how is not signal.SIGKILL:
        assert "interrupted: 50 of 108 are done; the same command resumes there" in said
    served.released.set()
    status, said = await run(served, requests)
    assert status == 0, said
    assert "50 of 108 already have a result in" in said
    assert len(answered(requests)) == len(set(answered(requests))) == 108
    assert {served.seen[prompt] for prompt in quick} == {1}
    assert {served.seen[prompt] for prompt in slow} == {2}


async def test_half_characters_neither_end_a_batch_nor_its_resumption(served, tmp_path):
    """JSON can hold an unpaired surrogate, and UTF-8 cannot."""
    requests = write(tmp_path / "in.jsonl", "\ud83d", "halves", "a")
    results = answers(requests)
    status, said = await run(served, requests)
    assert status == 0, said
    assert answered(requests) == ["a", "halves", "\ud83d"]
    kept = [line for line in results.read_text().splitlines(keepends=True) if '"a"' not in line]
    assert len(kept) == 2
    results.write_text("".join(kept))
    status, said = await run(served, requests)
    assert status == 0, said
    assert "2 of 3 already have a result" in said
    assert answered(requests) == ["a", "halves", "\ud83d"]


async def test_a_batch_whose_progress_nobody_reads_is_done_all_the_same(served, tmp_path):
    requests = write(tmp_path / "in.jsonl", "a", "b")
    with full_pipe() as writing:
        status, _ = await end(await start(served, requests, out=writing))
    assert status == 0
    assert answered(requests) == ["a", "b"]
