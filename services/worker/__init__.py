"""One worker: a process that hosts one vLLM engine and serves routers over gRPC.

lifecycle, node               how the process begins and ends: register, load, serve, drain, leave
advertise                     the address under which others find it
servicer, session             the gRPC side: one bounded stream per router
dispatcher, attempts          which requests run here, epoch by epoch, and how they ended
admission, isolation, entrance, grammars  the way into the engine: bounds, the door, grammars
outgoing, leases              KV that other workers pull from here, and who follows it
incoming, following           KV that comes from other workers
drafting, metrics, draft_metrics  counts of requests, steps and drafts

The engine itself is in baton.services.engine.
"""
