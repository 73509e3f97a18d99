"""Deploy several models on one GPU with one `baton up`, leaving out arms that cannot start.

An arm is an entry of `models:` in the configuration. `baton up` forks its processes after importing vLLM, so
a deployment pays for the import once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from baton.services.fleet.devices import cpu_build
from bench.traffic import Answer, stream
from harness.deployment import Deployment
from harness.scrape import samples

Arm = dict[str, Any]  # an entry of `models:`
Metrics = dict[str, Counter[str]]  # arm -> sums over its workers
Keep = Callable[[dict[str, Any]], None]  # writes a part's figures so far
KINDS = ("encode", "prefill", "decode", "mixed")
TRIES = 3
LOADED = "handoffs_loaded_total "
LOOK_S, WATCH_S = 0.1, 0.01
SAID = 800  # characters of a failed start's output
_WORKER = rf"(\S+)-(?:{'|'.join(KINDS)})-\d+"


class StartFailed(RuntimeError):
    """A deployment did not become ready. arms: those to blame, if known."""

    def __init__(self, why: str, arms: set[str]) -> None:
        super().__init__(why)
        self.arms = arms


@dataclass
class Served:
    """A deployment that is ready."""

    one: Deployment
    arms: list[str]
    failed: dict[str, str]  # arm that was left out -> its output
    start_s: float

    @property
    def url(self) -> str:
        return self.one.url

    def metrics(self) -> Metrics:
        """Return the counters and histogram sums and counts of each arm's workers."""
        found: Metrics = {arm: Counter() for arm in self.arms}
        for log in sorted((self.one.folder / "logs").glob("*.log")):
            worker = re.fullmatch(_WORKER, log.stem)
            urls = re.findall(r"metrics on (http://\S+)", log.read_text(errors="replace"))
            if not (worker and urls and worker[1] in found):
                continue
            try:
                found[worker[1]].update(_scraped(urls[-1].removesuffix("/metrics"), "baton_worker_"))
            except OSError as problem:  # the worker may have died
                print(f"no metrics of {log.stem}: {problem}", flush=True)
        return found

    def stages(self) -> Counter[str]:
        """Return the routers' sums and counts of handoff stages, over all arms."""
        return _scraped(self.url, "baton_router_handoff_stage_")


@contextmanager
def serving(
    folder: Path,
    arms: Mapping[str, Arm],
    engine: dict[str, Any],
    limit_s: float,
    *,
    cold: bool = True,
    **sections: Any,
) -> Iterator[Served]:
    """Serve the arms that can start on one GPU. Raises StartFailed if none can.

    engine: the common `engine` section; sections: further ones; limit_s: the timeout of a start; cold: run
    the command as a user does instead of forking it.
    """
    left, failed = dict(arms), dict[str, str]()
    for number in range(TRIES):
        config: dict[str, Any] = {"engine": engine, "models": left, **sections}
        if not cpu_build():
            workers = sum(sum(arm["workers"].values()) for arm in left.values())
            config["fleet"] = {"devices": [0] * workers}
        with closing(Deployment(folder / f"start-{number}", config=config, cold=cold)) as one:
            try:
                took = _start(one, set(left), limit_s)
            except StartFailed as problem:
                print(problem, flush=True)
                if not problem.arms or number == TRIES - 1 or problem.arms == set(left):
                    raise
                failed |= dict.fromkeys(problem.arms, str(problem)[-SAID:])
                left = {name: arm for name, arm in left.items() if name not in problem.arms}
                continue
            print(f"ready after {took:.0f} s: {', '.join(left)}", flush=True)
            yield Served(one, list(left), failed, round(took, 1))
            return


def _start(one: Deployment, arms: set[str], limit_s: float) -> float:
    """Start the deployment and return the seconds until it was ready. Raises StartFailed."""
    began = time.monotonic()
    process = one.start("up", "up", "--log-dir", str(one.folder / "logs"))
    while "\nReady." not in process.text:
        took = time.monotonic() - began
        ended = process.popen.poll() is not None
        if ended or took > limit_s:
            what = "ended" if ended else f"was not ready after {took:.0f} s"
            said = process.text
            raise StartFailed(f"baton up {what}: {said.strip()[-2 * SAID :]}", blamed(said) & arms)
        time.sleep(LOOK_S)
    return time.monotonic() - began


def blamed(said: str) -> set[str]:
    """Return the arms that made a start fail, or those it was still waiting for."""
    ended = re.findall(rf"error: {_WORKER} could not start", said) or re.findall(
        r"error: models\.(\S+?)[.:]", said
    )
    if ended:
        return {ended[-1]}
    waits = re.findall(r"waiting for (.*?)(?:;|$)", said, re.MULTILINE)
    return set(re.findall(rf"{_WORKER}(?:,|$)", waits[-1])) if waits else set()


def _scraped(url: str, prefix: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for sample in samples(url):
        if not sample.name.startswith(prefix) or not sample.name.endswith(("_total", "_sum", "_count")):
            continue
        name = sample.name.removeprefix(prefix)
        if "transport" in sample.labels and name.endswith("_total"):
            name = f"{name} {sample.labels['transport']}"
        if "stage" in sample.labels:
            name = f"{sample.labels['stage']} {name}"
        found[name] += sample.value  # type: ignore[assignment]
    return found


def handoffs(before: Counter[str], after: Counter[str]) -> dict[str, Any]:
    """Return an arm's handoffs between two scrapes: counts by transport, MiB, mean ms by stage."""
    by = {key: after[key] - before[key] for key in after}
    counts = {key.removeprefix(LOADED): int(by[key]) for key in by if key.startswith(LOADED) and by[key]}
    moved = sum(value for key, value in by.items() if key.startswith("handoff_bytes_total "))
    found: dict[str, Any] = {"loaded": counts, "mib": round(moved / 2**20, 1)} if counts else {}
    for stage in ("save", "move", "total"):
        if count := by.get(f"handoff_{stage}_seconds_count"):
            found[f"{stage}_ms"] = round(1e3 * by[f"handoff_{stage}_seconds_sum"] / count, 2)
    return found


def stages(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    """Return the mean ms of each handoff stage between two scrapes."""
    found = {}
    for key in after:
        stage, _, kind = key.partition(" ")
        if kind == "seconds_count" and (count := after[key] - before[key]):
            took = after[f"{stage} seconds_sum"] - before[f"{stage} seconds_sum"]
            found[stage] = round(1e3 * took / count, 2)
    return found


async def killed(
    http: aiohttp.ClientSession,
    served: Served,
    name: str,
    prompt: list[int],
    lengths: tuple[int, int],
    answer: Answer,
) -> int:
    """Kill the decode worker of a running answer. Return the number of tokens that the client had by then.

    lengths: the answer's length, and how many of its tokens must have arrived. answer: filled in, even if the
    request fails.
    """
    length, least = lengths
    asked = asyncio.create_task(stream(http, served.url, name, prompt, length, into=answer))
    victim = 0
    while not victim and not (await asyncio.wait([asked], timeout=WATCH_S))[0]:
        if answer.tokens >= least:
            victim = await _decoding(http, served, name)
    at = answer.tokens
    if victim:
        psutil.Process(victim).kill()
    try:
        await asked
    except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
        print(f"{name}, whose worker was killed at {at}: {error!r}"[:600], flush=True)
    return at


async def _decoding(http: aiohttp.ClientSession, served: Served, name: str) -> int:
    """Return the process id of an arm's decode worker that runs a request, or 0."""
    for log in (served.one.folder / "logs").glob(f"{name}-decode-?.log"):
        said = log.read_text(errors="replace")
        process, url = re.findall(r"\[\S+\.(\d+)\] .*metrics on (\S+)", said)[-1]
        async with http.get(url) as found:
            if re.search(r"^baton_worker_requests_running\S* [1-9]", await found.text(), re.MULTILINE):
                return int(process)
    return 0


def drafts(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """Return an arm's drafted and accepted tokens between two scrapes."""
    names = ("drafted", "accepted")
    found = {name: int(after[f"{name}_tokens_total"] - before[f"{name}_tokens_total"]) for name in names}
    return found if found["drafted"] else {}
