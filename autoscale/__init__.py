"""Autoscaling: how many prefill, decode and encode workers meet the goals, and the orders to get there.

    goals       latencies, bounds, patience
    seen        the input of one decision
    histogram   fixed-bound buckets, in which routers report distributions
    loads       sums and differences of routers' counts
    demand      arriving requests, from the routers' counts
    capacity    the speed of a worker, learned from the workers' counts
    queueing    the share of requests within the goals, for a number of workers
    sizing      the minimum numbers of workers that meet the goals
    orders      from wanted numbers to role changes and places of fleets
    balance     role changes without goals
    controller  one step: runs all of the above, with patience, and checks earlier predictions

Nothing here uses a clock, a store or a network: the scheduler (`scheduler/autoscaler.py`) and the simulator
(`tests/autoscale/simulation.py`) drive the same code.
"""
