"""Settings of the transports' tests."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _as_between_hosts():
    """Make NIXL use TCP; on one host it would copy from the other process, without connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        yield
