"""A deployment on a Ray cluster: `baton ray`, `baton.ray.deploy`.

    config.py      cluster.yaml: Baton's settings and three sections with Ray Serve LLM's keys
    sections.py    those sections
    cluster.py     all calls of Ray: nodes, placement groups, actors
    keeper.py      the actor of a node, which owns one `baton node`
    deployment.py  the control loop
    pauses.py      its pauses and reports when Ray fails
    nodes.py       the nodes in use and their keepers, and the routers on them
    slots.py       the wanted workers and their placement groups
    gangs.py       the processes of a gang on each of its nodes
    orders.py      the scheduler's orders for workers, and requests to Ray's autoscaler
    desk.py        the actor that other processes call: `baton ray status`, `scale`, `down`
    trust.py       the CA and the tokens of the parts
    serve.py       the same parts as an application of Ray Serve
    proxy.py       forwards requests from its ingress to the router

Ray is an extra. Only cluster.py (lazily) and serve.py import it.
"""
