import pytest

from baton.services.cli.node import _ordered
from baton.services.config import load
from baton.services.errors import ConfigError
from baton.services.fleet.supervisor import Fleet


def test_a_further_machine_needs_workers_that_span_machines():
    settings = load({"fleet": {"node_rank": 1}})
    with pytest.raises(ConfigError, match=r"^fleet\.node_rank \(value 1\): .* set engine\.nodes"):
        _ordered(settings, Fleet(0, 0, 1))
