"""Background work is restarted after a bug, which is logged."""

import ast
import asyncio
import gc
import threading
from collections import Counter

import pytest

from baton import keeping
from baton.tasks import stop
from harness.support import ROOT, eventually

# Files that start other tasks and threads, and why those cannot end silently.
OTHERS = {
    "src/baton/keeping.py": "the guard",
    "src/baton/metrics.py": "Python's own server, which answers each request by itself",
    "src/baton/rpc.py": "ends by itself: a channel's close",
    "src/baton/security/join_service.py": "one connection's",
    "src/baton/tasks.py": "tasks that end by themselves: a bug is logged, or raised where one waits",
    "handoff/save/door.py": "one connection's: what ends it ends the connection",
    "scheduler/endpoints.py": "one check, made again within a second",
    "services/engine/grammars/house.py": "a helper's: what ends it ends the helper, and another one starts",
    "services/engine/host.py": "the engine: what ends it ends the process",
    "services/engine/limb.py": "the ranks: what ends it ends the process",
    "services/gang/link.py": "one stream's: its end is the end of this process",
    "services/offline/client.py": "awaited together",
    "services/offline/deployment.py": "reads a pipe; tells its end however it ends",
    "services/offline/pipeline.py": "a loop of tasks, each awaited; and one close",
    "services/ray/deployment.py": "the loop: what ends it ends the deployment",
    "services/ray/serve.py": "one start, awaited",
    "services/router/http/federation.py": "awaited",
    "services/router/http/streaming.py": "the comments of one response",
    "services/router/media/processes.py": "reads one answer, awaited",
    "services/router/ops/server.py": "a server: what ends it is logged",
    "services/router/pool.py": "one connection; those who wait are told",
    "services/router/relay.py": "one request's",
    "services/router/worker_stream.py": "one stream's: its end is the stream's",
    "services/router/vllm/logprobs.py": "one prompt's; its request is told",
    "services/simulate/simulation.py": "awaited in a group",
    "services/worker/embeddings.py": "one request's, awaited together",
    "services/worker/entrance.py": "one request's grammar",
    "services/worker/gang.py": "waits for one event",
    "services/worker/following.py": "one attempt's call, whose end it is told; and one close",
    "services/worker/limb.py": "waits for one event each",
    "services/worker/process.py": "waits for one event each",
    "services/worker/servicer.py": "one stream's: the first that ends ends it",
    "services/worker/starting.py": "one start, awaited; waits for one event",
}
STARTS = {"create_task", "ensure_future", "spawn", "spawn_apart", "Thread"}


def starts(file):
    text = file.read_text()
    if not any(f"{one}(" in text for one in STARTS):  # parsing takes a second for all files
        return False
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return any((one.id if isinstance(one, ast.Name) else getattr(one, "attr", "")) in STARTS for one in calls)


def test_all_other_tasks_and_threads_are_known():
    folders = ("autoscale", "handoff", "scheduler", "services", "src/baton")
    gc.collect()  # garbage of other tests that warns inside `ast.parse` makes that fail in Python 3.11
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if not file.is_symlink() and starts(file)}
    processes = {"services/fleet/parts.py"}  # `spawn` of a process, which is watched and restarted
    assert found - processes == set(OTHERS)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(keeping, "PAUSE_S", 0.01)


async def test_a_task_is_restarted(caplog):
    runs, again = Counter[str](), asyncio.Event()

    async def work():
        runs["task"] += 1
        if runs["task"] < 4:
            raise ValueError("a bug")
        again.set()
        await asyncio.sleep(60)

    task = keeping.keep(work, "the work")
    async with asyncio.timeout(10):
        await again.wait()
    told = [one.getMessage() for one in caplog.records]
    assert told == [
        f"the work failed because of a bug; restarting it in {pause} s" for pause in ("0.01", "0.02", "0.04")
    ]
    assert "ValueError: a bug" in caplog.text
    await stop(task)
    assert task.cancelled()


async def test_a_task_may_return():
    ran = []

    async def work():
        ran.append(1)

    await keeping.keep(work, "the work")
    assert ran == [1]


def test_a_thread_is_restarted(caplog):
    runs, over = Counter[str](), threading.Event()

    def work():
        runs["thread"] += 1
        if runs["thread"] < 3:
            raise ValueError("a bug")
        over.set()

    thread = keeping.keep_thread(work, "the work")
    thread.start()
    assert over.wait(10)
    thread.join(10)
    assert caplog.text.count("the work failed because of a bug") == 2
    eventually(lambda: not thread.is_alive(), 10, "it has returned")
