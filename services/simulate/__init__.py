"""A deployment simulated on virtual time: the product's own decisions, workers that follow curves.

    loop        asyncio on virtual time
    profile     pace and size of the workers: measured curves, in a JSON file
    traces      requests drawn at random;  mooncake  recorded ones
    cache, engine, worker      a simulated worker, from its KV blocks to its heartbeats
    deployment  the scheduler's roster, ledger, placer, policy and index of prefixes, and the workers
    router      the router's waiting room and recovery, on these
    simulation  one run;  figures  its outcome
    tune        the split into prefill and decode workers that serves a trace best

docs/simulator.md tells what is simulated and what is not.
"""
