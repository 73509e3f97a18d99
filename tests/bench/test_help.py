import importlib

import pytest

from bench.flood import at_a_time
from bench.names import ALONE, NAMES


@pytest.mark.parametrize("name", [*NAMES, *ALONE, "report"])
def test_each_bench_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{name.replace('-', '_')}").main(["--help"])
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_a_moment_counts_for_as_long_as_it_lasts():
    held = at_a_time([(0.0, 10.0), (5.0, 9.999), (5.0, 10.0), (9.998, 9.999)])
    assert [held(share) for share in (0.25, 0.5, 0.75, 0.99, 1.0)] == [1, 1, 3, 3, 4]
