"""A worker with two pipeline stages, beside one without."""

from tests.services.worker.router import DECODE, connected, prompt, request


async def test_a_pipeline_hands_over_to_a_plain_worker_and_back(workers, mixed):
    pipeline = {"pipeline_parallel_size": 2, "enable_prefix_caching": False}
    worker = workers.started("mixed", engine=pipeline)
    async with connected(worker.address) as piped, connected(mixed.address) as plain:
        ways = (piped, plain), (plain, piped), (piped, piped)
        for number, (source, target) in enumerate(ways):
            asked = prompt(600, seed=31 + number)  # three steps
            handed = request(f"pipeline {number}", asked)
            begun = await source.prefill(handed)
            rest = await target.run(handed, DECODE, source=source.source(handed))
            assert rest.admitted.bytes > 0
            alone = await plain.run(request(f"no pipeline {number}", asked), DECODE)
            assert begun.tokens + rest.tokens == alone.tokens
