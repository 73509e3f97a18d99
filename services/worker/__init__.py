"""One worker: a process that hosts one vLLM engine and serves routers over gRPC.

lifecycle, node          how the process begins and ends: register, load, serve, drain, leave
servicer, session        gRPC's side: one stream a router, bounded
dispatcher, attempts     which requests run here, epoch by epoch, and what became of them
vllm_host, vllm_engine   the engine and its thread
vllm_requests, _outputs  from a Start to vLLM's request, from its outputs to replies
vllm_continuation        requests that go on here after they began elsewhere; loaded by vllm_plugin
roles, mixed             what differs between prefill, decode and mixed workers
"""
