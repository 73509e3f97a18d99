"""Autoscaling: how many prefill and decode workers the goals need, and the orders that get there.

    goals       what is wanted: times, bounds, patience
    seen        the input of one decision
    histogram   fixed-bound buckets, in which routers report distributions
    demand      what comes in, from the counts of routers
    capacity    what a worker can do, learned from the counts of workers
    queueing    the share of requests within the goals, for a number of workers
    sizing      the least numbers of workers that meet the goals
    orders      from wanted numbers to role changes and places of fleets
    controller  one step: all of these, patience, and predictions compared with what came

Nothing here knows a clock, a store or a network: the scheduler (`scheduler/autoscaler.py`) and the simulator
(`tests/autoscale/simulation.py`) drive the same code.
"""
