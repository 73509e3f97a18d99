"""The router: OpenAI's HTTP API in, tokens out. It runs no engine; its engines are the workers.

    HTTP ── http/: connections, authentication, admission ── vLLM's OpenAI app (vllm/frontend.py)
                                        EngineCoreRequest │         ▲ EngineCoreOutputs
                                                vllm/engine_client.py, output_queue.py
                                                          ▼         ▲
     waiting.py, placement.py ──── relay.py: one request's life     │
     (the scheduler)               state, recovery, suspects        │
                                                          ▼         │
                            legs.py: the phases of a placement ──▶ sink.py
                                                          │ ▲
                                   pool.py, worker_stream.py: a gRPC stream to each worker

The relay runs one placement after another; a placement's two legs run at the same time. Tokens go from the
stream to the leg and on to the front end, without the relay.
`app.py` opens the sockets, `serving.py` serves, `served.py` assembles the parts of each model; `cluster.py`
watches the workers for /health and the model's limits; `vllm/block_hashes.py` names a prompt's KV blocks for
the scheduler; `prefix.py` has the first blocks of a prompt pulled from another worker.
"""
