"""A worker with two pipeline stages, beside one without."""

from tests.services.worker.router import DECODE, connected, prompt, request


async def test_a_pipeline_hands_over_to_a_plain_worker_and_back(workers, target):
    pipeline = {"pipeline_parallel_size": 2, "enable_prefix_caching": False}
    worker = workers.started("mixed", engine=pipeline)
    async with connected(worker.address) as piped:
        ways = (piped, target), (target, piped), (piped, piped)
        for number, (first, then) in enumerate(ways):
            handed = request(f"pipeline {number}", prompt(600, seed=31 + number))  # three steps
            begun = await first.prefill(handed)
            rest = await then.run(handed, DECODE, source=first.source(handed))
            assert rest.admitted.bytes > 0
            assert begun.tokens + rest.tokens == await target.alone(handed)
