"""A deployment on a Ray cluster: `baton ray`, `baton.ray.deploy`.

    config.py      cluster.yaml: Baton's settings and three sections with Ray Serve LLM's keys
    sections.py    those sections
    cluster.py     all calls of Ray: nodes, placement groups, actors
    keeper.py      the actor of a node, which owns one `baton node`
    deployment.py  the loop that keeps what should run and what runs the same
    nodes.py       the nodes in use, and the order in which their parts end
    slots.py       the workers that should run, and the room that Ray found for them
    fleet.py       the scheduler's orders for workers, and requests to Ray's autoscaler
    placing.py     computes names and nodes
    desk.py        the actor that other processes call: `baton ray status`, `scale`, `down`
    serve.py       the same parts as an application of Ray Serve
    proxy.py       forwards requests from its ingress to the router

Ray is an extra. Only cluster.py (lazily) and serve.py import it.
"""
