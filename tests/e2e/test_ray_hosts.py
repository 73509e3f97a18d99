"""`baton ray up` on two hosts of harness/ray_hosts.py: Ray on both, prefill on one, decode on the other.

`WHOLE_TABLE=1 make test ARGS=tests/e2e/test_ray_hosts.py` runs all of test_api's tests through them, and then
kills a host.
"""

import json
import os
import re
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import openai
import psutil
import pytest

from harness.deployment import MODEL_NAME
from harness.netns import why_not
from harness.prompts import prompts
from harness.ray_hosts import ray_hosts
from harness.support import CALL_S, PYTHON, ROOT, eventually
from tests.e2e import test_api

EVERY = 3  # use every third prompt
MAX_TOKENS = 16
LONG = 300  # tokens of the answer during which a host dies
CLIENTS = 4


def _ask(url, prompt, max_tokens, **more):
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": max_tokens == LONG, **more}
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)


def answer(url, prompt, max_tokens=MAX_TOKENS):
    """Return (token ids, finish reason, prompt tokens, completion tokens)."""
    with urllib.request.urlopen(_ask(url, prompt, max_tokens), timeout=CALL_S) as reply:
        done = json.loads(reply.read())
    (choice,), usage = done["choices"], done["usage"]
    return choice["token_ids"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def stream(url, prompt, max_tokens):
    """Yield an answer's token ids as they arrive."""
    with urllib.request.urlopen(_ask(url, prompt, max_tokens, stream=True), timeout=CALL_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                yield event["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := why_not():
        pytest.skip(why)
    die = "WHOLE_TABLE" in os.environ
    with ray_hosts(tmp_path_factory.mktemp("ray-hosts"), routers=2, die=die) as one:
        yield one


@dataclass(frozen=True)
class Served:
    """The deployment with the interface that test_api needs."""

    url: str
    clients: ExitStack

    def client(self):
        one = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=CALL_S, max_retries=0)
        return self.clients.enter_context(one)


@pytest.fixture(scope="module")
def one_pair(hosts):
    """Replace test_api's local pair with these hosts."""
    with hosts.forwarded() as url, ExitStack() as stack:
        yield Served(url, stack)


if "WHOLE_TABLE" in os.environ:  # pytest finds test_api's tests among this module's names
    clients = test_api.clients
    globals().update({name: one for name, one in vars(test_api).items() if name.startswith("test_")})


@pytest.mark.timeout(400)
def test_greedy_answers_equal_those_of_one_engine(one_pair, reference):
    """KV is pulled over gRPC with TLS, and the model's MTP layer drafts."""
    asked = prompts()[::EVERY][:20]
    assert len(asked) == 20
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: answer(one_pair.url, prompt), asked))
        expected = list(pool.map(lambda prompt: answer(reference, prompt), asked))
    print(f"{sum(one == other for one, other in zip(got, expected, strict=True))} of {len(got)} equal")
    assert got == expected
    assert len({tuple(one[0]) for one in expected}) > 10  # the model's answers do differ


@pytest.mark.timeout(200)
def test_who_runs_where(hosts):
    told = hosts.status()
    assert told["urls"] == [f"http://{one.address}:8000" for one in (hosts.first, hosts.second)]
    where = {part["name"]: (part["node"], part["state"]) for part in told["parts"]}
    assert where == {
        "prefill-0": ("first", "ready"),
        "decode-0": ("second", "ready"),
        "router-0": ("first", "ready"),
        "router-1": ("second", "ready"),
    }
    # The command that `baton ray up` prints.
    look = re.search(r"requests and load: +baton (.*)", hosts.text)
    assert look is not None
    assert told["scheduler"] in look[1]
    status = json.loads(hosts.baton(*look[1].split(), "--json"))
    found = {one["identity"]["name"]: one["identity"]["address"] for one in status["workers"]}
    assert found["prefill-0"].startswith(f"{hosts.first.address}:")
    assert found["decode-0"].startswith(f"{hosts.second.address}:")
    handed = [past for past in status["handoffs"] if past["cost"].get("transport")]
    assert {past["cost"]["transport"] for past in handed} == {"tcp"}  # the hosts share no memory
    assert len(handed) >= 8
    drafting = next(one["load"]["drafting"] for one in status["workers"] if "drafting" in one["load"])
    assert int(drafting["drafts"]) > 0


@pytest.mark.timeout(100)
def test_each_host_has_a_router(hosts, one_pair):
    with hosts.forwarded(hosts.second) as url:
        for prompt in prompts()[:2]:
            assert answer(url, prompt) == answer(one_pair.url, prompt)


NAMES = iter(("third", "fourth", "fifth", "sixth", "seventh"))


def joined(hosts):
    return hosts.join(next(NAMES))


def replaced(hosts, new):
    """Wait until the decode worker is ready on another host, usually `new`, and return that host."""
    here = [new]

    def back():
        if here[-1].process.poll() is not None:  # Ray gives up a node that takes 30 s to join a busy machine
            here.append(joined(hosts))
        return f"; back on {here[-1].name}" in hosts.text

    eventually(back, 120, "the worker is back")
    where = {part["name"]: (part["node"], part["state"]) for part in hosts.status()["parts"]}
    assert where["decode-0"] == (here[-1].name, "ready")
    return here[-1]


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: a third host joins")
@pytest.mark.timeout(600)
def test_a_host_that_dies_is_answered_for_and_its_worker_comes_back(hosts, one_pair, reference):
    """All processes of the second host are killed under four streams, which continue to their end.

    Its decode worker waits for room until a third host joins; its router moves there, too.
    """
    asked = [prompts()[-1][begin : begin + 500] for begin in range(0, 4 * CLIENTS, 4)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        expected = [one[0] for one in pool.map(lambda prompt: answer(reference, prompt, LONG), asked)]
        assert {len(one) for one in expected} == {LONG}
        begun = threading.Semaphore(0)

        def whole(prompt):
            got = []
            for tokens in stream(one_pair.url, prompt, LONG):
                if len(got) < LONG / 10 <= len(got) + len(tokens):
                    begun.release()
                got += tokens
            return got

        answers = [pool.submit(whole, prompt) for prompt in asked]
        for _ in asked:
            assert begun.acquire(timeout=CALL_S)
        hosts.second.kill()
        new = joined(hosts)  # starts before Ray notices the dead one
        assert [one.result(CALL_S) for one in answers] == expected
    assert answer(one_pair.url, prompts()[0])[0]
    eventually(lambda: "second       this node is dead" in hosts.text, 40, "Ray notices")
    third = replaced(hosts, new)
    assert re.search(r"decode-0 +was lost with second; waits for room: 1 CPU", hosts.text)
    assert re.search(rf"router-1 +goes to {third.name}", hosts.text)
    assert answer(one_pair.url, asked[0], LONG)[0] == expected[0]


@pytest.mark.timeout(200)
def test_ctrl_c_leaves_nothing_behind(hosts):
    look = "import psutil; print([p.info['cmdline'] for p in psutil.process_iter(['cmdline'])])"
    assert "baton prefill-0" in hosts.first.run([str(PYTHON), "-c", look], 20).stdout
    (command,) = psutil.Process(hosts.up.pid).children()  # the parent only entered the host's namespaces
    command.send_signal(signal.SIGINT)
    assert hosts.up.wait(CALL_S) == 0, hosts.text
    assert "nothing is left" in hosts.text
    left = hosts.first.run([str(PYTHON), "-c", look], 20).stdout
    assert "baton" not in left.replace(str(ROOT), "")
    assert hosts.first.process.poll() is None  # Ray still runs
