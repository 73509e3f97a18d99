"""The router: OpenAI's HTTP API in, tokens out. It runs no engine; its engines are the workers.

    HTTP ── http/connections.py ── http/authentication.py ── http/admission.py ── vLLM's OpenAI app
                                                                                  (vllm/frontend.py)
                                                         EngineCoreRequest │         ▲ EngineCoreOutputs
                                                                  vllm/engine_client.py, vllm/outputs.py
                                                                           │         ▲
       placement.py, waiting.py ─── relay.py (one request's life) ◄────────┘         │
       (the scheduler)                │    its state.py, journal.py, recovery.py     │
                                      ▼                                              │
                                    leg.py (one phase on one worker) ─── tokens ─ sink.py
                                      │    ▲
                                    pool.py, stream.py (gRPC streams to the workers)

A request passes through its relay once per phase; a token goes from the stream to the leg and from there to
the front end. `http/app.py` puts the parts together and serves; `cluster.py` watches the workers for /health
and the model's limits; `metrics.py` counts; `prefix.py` hashes prompts for the scheduler.
"""
