"""Which tests run side by side: `make test` has two processes of pytest (xdist, --dist loadgroup)."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay together, as they share engines; so do all deployments, which fill the machine."""
    for item in items:
        file = item.path.relative_to(item.config.rootpath)
        item.add_marker(pytest.mark.xdist_group("e2e" if "e2e" in file.parts else str(file)))
