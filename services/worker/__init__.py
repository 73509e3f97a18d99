"""One worker: a process that hosts one vLLM engine and serves routers over gRPC.

lifecycle, node               how the process begins and ends: register, load, serve, drain, leave
advertise                     the address under which others find it
servicer, session             gRPC's side: one stream a router, bounded
dispatcher, attempts          which requests run here, epoch by epoch, and how they ended
admission, isolation, entrance, grammars  their way into the engine: bounds, the door, grammars
outgoing, leases              KV that other workers pull from here, and who follows it
incoming, following           KV that comes from other workers
drafting, metrics, draft_metrics  what is counted of requests, steps and drafts

The engine that it hosts is baton.services.engine.
"""
