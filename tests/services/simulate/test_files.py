import json

import pytest
from typer.testing import CliRunner

from baton.services.cli import main
from baton.services.errors import ConfigError
from baton.services.simulate import mooncake, profile
from baton.services.simulate.profile import Pace, Profile

LINES = [
    {"timestamp": 1_000, "input_length": 1_200, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 3_000, "input_length": 1_700, "output_length": 10, "hash_ids": [0, 1, 5, 6]},
]


def trace_file(folder, *lines):
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_a_trace_in_mooncakes_format(tmp_path):
    trace = mooncake.read(trace_file(tmp_path, *LINES), speed=2.0)
    one, two = trace.begin()
    # The rest of its prompt is not a full block.
    assert (one.at, one.prompt, one.output, len(one.hashes)) == (0.0, 1_200, 20, 2)
    assert (two.at, two.prompt, len(two.hashes)) == (1.0, 1_700, 3)
    assert one.hashes == two.hashes[:2]
    assert len({one >> 4 for one in two.hashes}) == 3  # block keys ignore the lowest bits
    assert trace.seconds == pytest.approx(1.0)
    assert len(list(mooncake.read(trace_file(tmp_path, *LINES), most=1).begin())) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"timestamp": 0, "input_length": 5, "hash_ids": []}, "line 2: KeyError"),
        ({**LINES[0], "hash_ids": ["x"]}, "line 2: ValueError"),
        ({**LINES[0], "output_length": 0}, "line 2: input_length and output_length must be at least 1"),
        ([1], "line 2: TypeError"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    with pytest.raises(ConfigError, match=says):
        mooncake.read(trace_file(tmp_path, LINES[0], line))


def test_invalid_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no requests"):
        mooncake.read(trace_file(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        profile.load(tmp_path / "none.json")
    file = tmp_path / "profile.json"
    file.write_text('{"pace": {"prefill": [[5, 1], [5, 2]]}}')
    with pytest.raises(ConfigError, match=r"pace\.prefill: .*increasing sizes"):
        profile.load(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        profile.load(file)


def test_a_profile_is_loaded_from_its_file(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(Profile(name="mine", pace=Pace(accepted=2.5)).model_dump_json())
    assert profile.load(file) == Profile(name="mine", pace=Pace(accepted=2.5))


def test_step_times_follow_the_curves():
    pace = Pace(
        prefill=[(0, 0.01), (100, 0.11)],
        decode=[(0, 0.01), (1, 0.02), (11, 0.03)],
        prefill_context_s=1e-6,
        decode_context_s=1e-5,
    )
    assert pace.step_s(50, 0, 0, 0) == pytest.approx(0.06)
    # After the last point the last line continues.
    assert pace.step_s(200, 10_000, 0, 0) == pytest.approx(0.21 + 0.01)
    assert pace.step_s(0, 0, 6, 100) == pytest.approx(0.025 + 0.001)
    assert pace.step_s(50, 0, 6, 100) == pytest.approx(0.06 + 0.026 - 0.01)  # the fixed cost counts once


def test_baton_tune_prints_the_best_split(tmp_path):
    lines = [{**LINES[at % 2], "timestamp": 100 * at} for at in range(40)]
    arguments = ["tune", str(trace_file(tmp_path, *lines)), "--workers", "3", "--speed", "2"]
    result = CliRunner().invoke(main.app, [*arguments, "--goal-ttft", "2"], catch_exceptions=False)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if "%" in line]
    assert {row[0] for row in rows} >= {"1P2D", "2P1D", "3"}
    assert "baton up --" in result.stdout
    assert "ttft_ms: 2000" in result.stdout
    as_json = CliRunner().invoke(main.app, [*arguments, "--json"], catch_exceptions=False)
    found = json.loads(as_json.stdout)
    assert len(found) == 3
    assert found[0]["within_goals"] == max(one["within_goals"] for one in found)


def test_baton_tune_lists_the_kinds_of_traces():
    with pytest.raises(ConfigError, match=r"nor a kind of trace \(chats, shared"):
        CliRunner().invoke(main.app, ["tune", "chat", "--workers", "3"], catch_exceptions=False)
