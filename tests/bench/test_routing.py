import json

from aiohttp import web

from bench.routing import LETTERS, Load, chatted
from harness.serving import serving

LOAD = Load(users=3, chats=2, turns=3, systems=2, system=20, message=5, answer=4, think_s=0.001)


class Server:
    """Answers with letters that depend on the prompt and records the prompts."""

    def __init__(self):
        self.prompts = []

    async def complete(self, request):
        body = await request.json()
        self.prompts.append(body["prompt"])
        assert body["allowed_token_ids"] == LETTERS
        response = web.StreamResponse()
        await response.prepare(request)
        for token in self.answer(body["prompt"]).encode():
            chunk = json.dumps({"choices": [{"token_ids": [token]}]})
            await response.write(f"data: {chunk}\n\n".encode())
        return response

    @staticmethod
    def answer(prompt):
        return prompt[-LOAD.answer :][::-1]


async def asked(seed):
    """Run the chats of a seed. Return all prompts, and their lengths in the order of the answers."""
    server = Server()
    async with serving(server.complete) as place:
        sent = await chatted(f"http://{place}", LOAD, seed)
    return server.prompts, [length for length, _ in sent]


async def test_chats_continue_from_their_answers_behind_shared_system_prompts():
    (prompts, lengths), (again, _), (other, _) = [await asked(seed) for seed in (1, 1, 2)]
    assert sorted(prompts) == sorted(again) != sorted(other)
    assert len(prompts) == len(lengths) == LOAD.requests
    assert len({prompt[: LOAD.system] for prompt in prompts}) == LOAD.systems
    turns = [LOAD.system + LOAD.message + turn * (LOAD.message + LOAD.answer) for turn in range(LOAD.turns)]
    assert lengths == turns * (LOAD.users * LOAD.chats)
    for later in prompts:
        if len(later) > turns[0]:
            before = later[: -LOAD.message - LOAD.answer]
            assert before in prompts
            assert later.startswith(before + Server.answer(before))
