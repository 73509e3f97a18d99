"""The arms that tests/null_gpu serves on the null GPU, their requests, and their outcomes.

There is one deployment for each of vLLM's model runners: V2, a GPU's default, and V1, chosen by
VLLM_USE_V2_MODEL_RUNNER=0.
"""

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.gpu_answers import ARMS, DEMO_MTP, ENGINE, arm
from bench.gpu_fleet import drafts, handoffs, killed, serving
from bench.traffic import Answer, stream
from harness.continuation import thinking_model
from harness.null_gpu import entered
from harness.null_gpu.entered import Entry
from harness.null_gpu.tokens import token
from harness.support import CALL_S, PATIENCE

START_S = 90.0
TOKENS = 24
LONG, KILLED_FROM = 512, 16  # tokens of the answer whose worker is killed, and how many it has by then
THINKS = "v1-thinks"  # the arm whose model has tokens for thoughts
HYBRID = {"method": "mtp", "mtp_strategy": "with_ngram", "num_model_steps": 1}
MTP = {"method": "mtp", "verifier": "baton"}
V2 = {
    **{name: ARMS[name] for name in ("one", "shm", "tcp", "graphs", "mtp", "mtp-baton", "mtp-ngram")},
    **{name: ARMS[name] for name in ("eagle3", "ngram")},
    "nixl": arm(by="nixl"),
    "sync": arm(model=DEMO_MTP, drafts=MTP, async_scheduling=False),
    "sync-ngram": arm(model=DEMO_MTP, drafts=HYBRID, async_scheduling=False),
}
V1 = {
    "v1": arm(),
    "v1-sync": arm(async_scheduling=False),
    THINKS: arm(pair=False, async_scheduling=False),
    "v1-mtp": arm(model=DEMO_MTP, drafts=MTP, async_scheduling=False),
    "v1-mtp-ngram": arm(model=DEMO_MTP, drafts=HYBRID, async_scheduling=False),
}
V1[THINKS]["engine"]["reasoning_parser"] = "qwen3"
ALL = V2 | V1
for one in (V2["shm"], V2["mtp-baton"], V1["v1-sync"]):
    one["workers"]["decode"] = 2
# Fields of each arm's requests, chosen so that a worker calls all patches.
WISHES = (
    {},
    {"stop": ["never to be found"], "seed": 7, "temperature": 1.0, "top_p": 0.9},
    {"structured_outputs": {"regex": r"[\s\S]*"}},
)


def wishes(arm):
    """Return the fields of an arm's requests. The null GPU has no log-probabilities of drafts."""
    if arm["engine"]["speculative_config"]:
        return WISHES
    thinks = "reasoning_parser" in arm["engine"]
    return (*WISHES, {"logprobs": 2}, *([{"thinking_token_budget": 4}] if thinks else []))


@dataclass
class Report:
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    handoffs: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)
    continued: str = ""  # the token at which its worker was killed; "" if none was

    def row(self, name):
        """Return a line of the table of arms."""
        moved = " ".join(f"{count} by {by}" for by, count in self.handoffs.get("loaded", {}).items())
        drafted = f"{self.drafts['accepted']} of {self.drafts['drafted']}" if self.drafts else ""
        state = "; ".join(self.wrong)[:200] or "right"
        return f"{name:<14}{self.answers:>8}  {state:<8}  {moved:<14}{drafted:<14}{self.continued}"


HEAD = f"{'arm':<14}{'answers':>8}  {'':<8}  {'handoffs':<14}{'accepted':<14}killed at"


@dataclass
class Trial:
    reports: dict[str, Report] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # arms that could not start, and their output
    entered: set[Entry] = field(default_factory=set)


def tried(folder, arms, **environment):
    """Serve the arms, send requests to each, and kill a decode worker of those that have two."""
    folder.mkdir(parents=True)
    entries = folder / "entered"
    if THINKS in arms:
        arms[THINKS]["engine"]["model"] = str(thinking_model(folder / "model"))
    print(f"\nstarting {len(arms)} arms, a minute or more: {', '.join(arms)}", flush=True)
    further = {entered.FILE: str(entries), **environment}
    os.environ |= further
    try:
        with serving(folder, arms, ENGINE, START_S * PATIENCE) as served:
            found = Trial(failed=served.failed)
            asyncio.run(_ask(served, found))
    finally:
        for name in further:
            del os.environ[name]
    found.entered = entered.read(entries)
    return found


async def _ask(served, found):
    before = served.metrics()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as http:
        reports = await asyncio.gather(*(_answers(http, served.url, name, ALL[name]) for name in served.arms))
        after = served.metrics()
        for name, report in zip(served.arms, reports, strict=True):
            report.handoffs = handoffs(before[name], after[name])
            report.drafts = drafts(before[name], after[name])
            found.reports[name] = report
            print(report.row(name), flush=True)
        for name in served.arms:
            if served.one.config["models"][name]["workers"].get("decode", 0) > 1:
                report = found.reports[name]
                report.continued = await _kill(http, served, name, report)
                print(report.row(name), flush=True)


async def _answers(http, url, name, arm):
    report = Report()
    for number, wish in enumerate(wishes(arm)):
        for length in (20, 700):
            prompt = [1000 + 50 * number + i % 997 for i in range(length)]
            try:
                answer = await stream(http, url, name, prompt, TOKENS, **wish)
            except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
                report.wrong.append(f"{wish or 'greedy'}: {error!r}"[:400])
                continue
            report.answers += 1
            report.wrong += _difference(prompt, answer.token_ids)
    return report


def _difference(prompt, answer):
    """Return where an answer differs from the tokens expected at its positions."""
    expected = [token(len(prompt) + i) for i in range(len(answer))]
    at = next((i for i, pair in enumerate(zip(answer, expected, strict=True)) if len(set(pair)) > 1), None)
    if at is None:
        return []
    return [f"token {at} of a prompt of {len(prompt)}: {answer[at : at + 8]}, not {expected[at : at + 8]}"]


async def _kill(http, served, name, report):
    """Kill the decode worker of a running answer. Return at which token."""
    prompt, answer = [2000 + i % 997 for i in range(300)], Answer(0.0)
    at = await killed(http, served, name, prompt, (LONG, KILLED_FROM), answer)
    if answer.tokens != LONG:
        report.wrong.append(f"killed at {at}: {answer.tokens} tokens")
    report.wrong += _difference(prompt, answer.token_ids)
    return f"{at} of {LONG}"
