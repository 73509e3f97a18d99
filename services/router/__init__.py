"""The router: OpenAI's HTTP API in, tokens out. It runs no engine; its engines are the workers.

    HTTP ── http/: connections, authentication, admission ── vLLM's OpenAI app (vllm/frontend.py)
                                        EngineCoreRequest │         ▲ EngineCoreOutputs
                                                vllm/engine_client.py, outputs.py
                                                          ▼         ▲
     waiting.py, placement.py ──── relay.py: one request's life     │
     (the scheduler)               state, journal, recovery         │
                                                          ▼         │
         legs.py: a placement ──── leg.py: one phase of it ───▶ sink.py
                                                          │ ▲
                                   pool.py, stream.py: a gRPC stream to each worker

A request passes its relay once per placement; its tokens go from the stream to the leg and on to the front
end. The two legs of a placement run at the same time.
`app.py` assembles the parts and serves; `cluster.py` watches the workers for /health and the model's limits;
`metrics.py` counts; `vllm/block_hashes.py` names a prompt's KV blocks for the scheduler; `prefix.py` has a
prompt's beginning pulled from another worker.
"""
