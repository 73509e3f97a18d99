from baton.services.overview.workers import BAD, INFO, Row, changes


def row(worker_id, **values):
    usual = {"id": worker_id, "name": worker_id, "role": "decode", "state": "ready", "alarm": False}
    return Row(**{**dict.fromkeys(Row._fields), **usual, **values})


def told(before, now):
    return list(changes({one.id: one for one in before}, {one.id: one for one in now}))


def test_workers_come_change_and_go():
    a, flipped, b = row("a"), row("a", role="prefill"), row("b", state="starting")
    assert told([a], [a, b]) == [(INFO, "b registered")]
    assert told([a, b], [flipped, row("b")]) == [
        (INFO, "a: role decode → prefill"),
        (INFO, "b: state starting → ready"),
    ]
    gone = row("a", role="prefill", state="gone")
    assert told([flipped], [gone]) == [(BAD, "a is gone")]
    assert told([gone], [gone]) == []


def test_many_at_once_are_one_line():
    new = [row(f"w{number}") for number in range(9)]
    assert told([], new) == [(INFO, "w0, w1, w2, w3, w4 and 4 more registered")]


def test_an_alarm_is_raised_and_cleared():
    calm, alarmed = row("a"), row("a", alarm=True)
    assert [severity for severity, _ in told([calm], [alarmed]) + told([alarmed], [calm])] == [BAD, INFO]
