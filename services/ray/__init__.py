"""A deployment on a Ray cluster: `baton ray`, `baton.ray.deploy`.

    config.py      cluster.yaml: the settings tree and three sections in the words of Ray Serve LLM
    sections.py    those sections
    cluster.py     all that is asked of Ray: nodes, placement groups, actors
    keeper.py      the actor of a node, which owns one `baton node`
    deployment.py  the loop that keeps what should run and what runs the same
    nodes.py       the nodes in use, and the order in which their parts end
    slots.py       the workers that should run, and the room that Ray found for them
    fleet.py       which workers these are by the scheduler's orders, and what Ray's autoscaler is asked for
    placing.py     names and places, computed
    desk.py        the actor at which other processes ask and order: `baton ray status`, `scale`, `down`
    serve.py       the same parts as an application of Ray Serve
    proxy.py       its ingress' way to the router

Ray is an extra, imported by cluster.py when something of it is used, by serve.py, and by nothing else.
"""
