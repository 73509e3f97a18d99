"""The router: OpenAI's HTTP API in, tokens out. It has no engine; its engines are the workers.

    HTTP ── http/admission.py ── vLLM's OpenAI app (vllm/frontend.py)
                                 │ EngineCoreRequest          ▲ EngineCoreOutputs
                            vllm/engine_client.py ───── vllm/outputs.py
                                 │                            ▲
                            relay.py: one request's life; leg.py: one phase of it on one worker;
                                 │    state.py: what is known of it; recovery.py: what to do when a part fails
               placement.py ─────┴───── workers.py
              (the scheduler)        (a stream to each worker)

`http/app.py` puts it together and runs it; `cluster.py` knows the workers for /health and the model's limits;
`metrics.py` counts.
"""
