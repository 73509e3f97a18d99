"""One worker: a process that hosts one vLLM engine and serves routers over gRPC.

lifecycle, node, starting                   start and end of the process: register, load, serve, drain, leave
advertise                                   the addresses that the worker gives to others
servicer, router_session                    the gRPC service: one bounded stream per router
dispatcher, attempts                        the requests that run here, and how they ended
admission, entrance, grammars, engine_gate  what a request passes before it is in the engine
outgoing                                    KV that other workers pull from here
incoming, following                         KV that this worker pulls from others
media, encodes, embeddings                  images, and their embeddings from encode workers
gang, limb                                  this worker's place in a gang of engines
drafting, metrics                           counts of requests, steps and drafts

The engine itself is in baton.services.engine.
"""
