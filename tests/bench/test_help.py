import importlib

import pytest

from bench.names import ALONE, NAMES


@pytest.mark.parametrize("name", [*NAMES, *ALONE, "report"])
def test_each_bench_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{name.replace('-', '_')}").main(["--help"])
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
