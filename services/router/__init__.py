"""The router: OpenAI's HTTP API in, tokens out. The engines run on the workers.

    HTTP ── http/ ── vLLM's OpenAI app (vllm/frontend.py) ── vllm/engine_client.py
    relay.py: one request's life ── waiting.py, placement.py (the scheduler)
    legs.py: the phases of a placement ── pool.py, worker_stream.py: a gRPC stream to each worker

The relay runs one placement after another; a placement's two legs run at the same time. Tokens go from the
stream to the leg and on to the front end, bypassing the relay. `app.py` opens the sockets,
`serving.py` serves, `served.py` assembles the parts of each model.
"""
