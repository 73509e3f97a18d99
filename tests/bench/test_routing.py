"""The load of `bench routing`, as a server sees it, and its section of the benchmarks' page."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from bench.report_routing import SECTIONS
from bench.routing import LETTERS, Load, chatted

LOAD = Load(users=3, chats=2, turns=3, systems=2, system=20, message=5, answer=4, think_s=0.001)


class Server:
    """Answers with letters that depend on the prompt, and keeps the prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        self.prompts.append(body["prompt"])
        assert body["allowed_token_ids"] == LETTERS
        response = web.StreamResponse()
        await response.prepare(request)
        for token in self.answer(body["prompt"]).encode():
            chunk = json.dumps({"choices": [{"token_ids": [token]}]})
            await response.write(f"data: {chunk}\n\n".encode())
        return response

    @staticmethod
    def answer(prompt: str) -> str:
        return prompt[-LOAD.answer :][::-1]


async def asked(seed: int) -> tuple[list[str], list[int]]:
    """Have the chats of a seed. Return all prompts and, in the order of the answers, their lengths."""
    server, app = Server(), web.Application()
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        sent = await chatted(url, LOAD, seed)
    finally:
        await runner.cleanup()
    return server.prompts, [length for length, _ in sent]


async def test_chats_go_on_from_their_answers_behind_shared_system_prompts() -> None:
    prompts, lengths = await asked(seed=1)
    assert len(prompts) == len(lengths) == LOAD.requests
    assert len({prompt[: LOAD.system] for prompt in prompts}) == LOAD.systems
    turns = [LOAD.system + LOAD.message + turn * (LOAD.message + LOAD.answer) for turn in range(LOAD.turns)]
    assert lengths == turns * (LOAD.users * LOAD.chats)
    for later in prompts:
        if len(later) > turns[0]:
            before = later[: -LOAD.message - LOAD.answer]
            assert before in prompts
            assert later.startswith(before + Server.answer(before))


async def test_a_seed_gives_the_same_chats_whatever_their_order() -> None:
    first, again, other = [sorted((await asked(seed))[0]) for seed in (1, 1, 2)]
    assert first == again != other


def test_the_section_sets_the_simulation_beside_the_measurement() -> None:
    figures = {"ttft_p50_ms": 80.0, "ttft_p99_ms": 1234.0, "itl_p50_ms": 9.0, "itl_p99_ms": 20.0}
    figures |= {"computed_tokens": 20_000, "computed_share": 0.25, "tokens_per_s": 250.0}
    result: dict[str, Any] = {
        "machine": {"cores": 2, "cpu": "some", "when": "2026-01-01"},
        "load": vars(LOAD),
        "pairs": 2,
        "cache_tokens": 8192,
        "runs": {"default": [figures, figures]},
        "median": {"default": figures},
    }
    alone = "\n".join(map(str, SECTIONS["routing"](result)))
    assert "| default | 80 | 1,234 | 9.0 | 20 | 20,000 | 25% | 250 |" in alone
    assert "simulator" not in alone
    simulated = {**figures, "requests": 300, "requests_per_s": 90.0}
    result["simulation"] = {
        "split": "32P32D",
        "requests_per_s": 128.0,
        "seconds": 60.0,
        "policies": {"Baton": simulated},
    }
    both = "\n".join(map(str, SECTIONS["routing"](result)))
    assert "| Baton | 300 | 80 | 1,234 | 9.0 | 20.0 | 25% | 90.0 |" in both
