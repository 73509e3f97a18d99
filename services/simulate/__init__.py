"""The simulator: Baton's own decisions on virtual time, with workers whose step times follow measured curves.

    loop        asyncio on virtual time
    profile     speed and size of the workers, from a JSON file
    traces      random requests;  mooncake  recorded ones
    cache, engine, worker      a simulated worker
    deployment  the scheduler, which is Baton's own, and the workers
    router      a router, with Baton's own waiting room
    simulation  one run;  figures  its outcome
    tune        the search for the best split into prefill and decode workers

docs/simulator.md says what is simulated and what is not.
"""
