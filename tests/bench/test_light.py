import asyncio

import pytest
from aiohttp import web

from bench import light
from harness.fake_worker import until
from harness.serving import serving


@pytest.mark.parametrize(
    ("way", "idle_s", "connections"),
    [
        ("whole", 1.0, 1),
        ("stream", 1.0, 1),
        ("stream whose end is announced", 1.0, 2),
        ("the server has closed it", 1.0, 2),
        ("the server may be about to close it", 0.0, 2),
    ],
)
async def test_a_connection_is_reused_if_it_can_be(way, idle_s, connections, monkeypatch):
    monkeypatch.setattr(light, "IDLE_S", idle_s)
    seen = []

    async def answer(request):
        seen.extend([request.transport] if request.transport not in seen else [])
        response = web.StreamResponse() if "stream" in way else web.json_response({})
        if "announced" in way:
            response.force_close()
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n" if "stream" in way else b"")
        return response

    async with serving(answer) as place:
        client = light.Client(int(place.partition(":")[2]))
        for _ in range(2):
            reply = await client.post("/", {})
            assert (reply.status, reply.whole) == (200, True)
            if "closed" in way:
                seen[-1].close()
                await until(lambda: seen[-1].get_extra_info("socket").fileno() < 0, "it is closed")
                await asyncio.sleep(0.05)  # the client then sees the end
        assert len(seen) == connections
        await client.close()
