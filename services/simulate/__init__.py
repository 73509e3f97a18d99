"""A deployment simulated on virtual time: Baton's own decisions, and workers whose steps follow curves.

    loop        asyncio on virtual time
    profile     pace and size of the workers: measured curves, in a JSON file
    traces      requests drawn at random;  mooncake  recorded ones
    cache, engine, worker      a simulated worker, from its KV blocks to its heartbeats
    deployment  the scheduler's roster, ledger, placer, policy and index of prefixes, and the workers
    router      the router's waiting room and recovery, on these
    simulation  one run;  figures  its outcome
    tune        the search for the best split into prefill and decode workers

docs/simulator.md says what is simulated and what is not.
"""
