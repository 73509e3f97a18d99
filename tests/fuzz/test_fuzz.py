"""The HTTP surface under random requests: no 5xx but 503 and 504, and nothing is left behind.

FUZZ_EXAMPLES is the number of examples per operation: `FUZZ_EXAMPLES=1000 make test ARGS=tests/fuzz` tries
more.
"""

import os

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from harness.deployment import deployment, free_blocks, idle
from harness.support import CALL_S, QUICK, eventually
from tests.fuzz.cuts import cuts, perform

# Examples per operation, each sent as several bodies. Hypothesis begins with the simplest one, an empty body.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "3"))
CUTS = 12 * EXAMPLES
LIMIT_S = 60 + 2 * EXAMPLES
SETTINGS = settings(
    database=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Start a prefill and a decode worker. Frequent heartbeats soon show that nothing is left behind."""
    with deployment(tmp_path_factory.mktemp("target"), constants=QUICK) as one:
        yield one.up()


@pytest.fixture
def unharmed(target):
    """Check that nothing runs before and after the test, no block is held, and no process was replaced."""
    with httpx.Client(base_url=target.url, timeout=CALL_S) as http:  # cached blocks count as free
        http.post("/v1/completions", json={"model": "baton-demo", "prompt": "Hi", "max_tokens": 2})
    eventually(lambda: idle(target), 20, "the deployment is idle")
    blocks = free_blocks(target)  # worker id -> free blocks; an id ends with its process id
    yield target
    eventually(lambda: idle(target) and free_blocks(target) == blocks, 20, "nothing is left behind")
    assert target.healthy()


@pytest.mark.timeout(10 * LIMIT_S)
def test_whatever_the_document_allows(unharmed):
    # Imported here, because schemathesis takes a second and each process of pytest imports this file.
    from tests.fuzz.surface import UNAVAILABLE, operations, requests, send

    failed = []
    with httpx.Client(base_url=unharmed.url, timeout=CALL_S) as http:

        def try_out(operation):
            @settings(SETTINGS, max_examples=EXAMPLES)
            @given(requests(operation))
            def answered(request):
                case, bodies = request
                for body in bodies:
                    got = send(http, case, body)
                    if got is not None and got.status_code >= 500 and got.status_code not in UNAVAILABLE:
                        failed.append(f"{case.path} {got.status_code} {got.text[:200]} for {str(body)[:500]}")

            answered()

        for operation in operations(unharmed.url):
            try_out(operation)
    assert not failed, "\n".join(failed[:10])


@pytest.mark.timeout(10 * LIMIT_S)
def test_clients_that_leave_at_any_byte(unharmed):
    @settings(SETTINGS, max_examples=CUTS)
    @given(cuts())
    def survived(cut):
        got = perform(cut, unharmed.port)
        assert not got.startswith(b"HTTP/1.1 5")

    survived()
