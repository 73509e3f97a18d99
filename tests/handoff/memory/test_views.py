"""Readers that wait for a save's records."""

import threading
import time

import numpy as np
import pytest

from baton.handoff.errors import AlreadyTaken, SaveFailed
from baton.handoff.memory.views import SaveView, bytes_for, records_at

SLOTS, RECORD_BYTES = 4, 64


@pytest.fixture
def view():
    """A save of four slots whose records have not arrived."""
    memory = np.zeros(bytes_for(SLOTS, RECORD_BYTES), np.uint8)
    made = SaveView(memory, records_at(SLOTS), RECORD_BYTES, [(0, SLOTS)])
    made.expect()
    return made


def arrive(view, *records):
    view.arrived(records[0], np.zeros(len(records), np.uint64))


def test_a_wait_ends_with_the_records_that_are_there(view):
    arrive(view, 0, 1)
    assert view.wait(0, 4, "KV", lambda: None) == 2


def test_the_polling_interval_depends_on_the_last_wait(view):
    looks = []

    def waited_s(record):
        looks.clear()
        late = threading.Timer(0.05, arrive, (view, record))

        def look():
            if not looks:
                late.start()  # not earlier, because on a busy machine the wait may begin late
            looks.append(time.monotonic())

        began = time.monotonic()
        assert view.wait(record, record + 1, "KV", look) == record + 1
        late.join()
        return time.monotonic() - began

    waited_s(0)
    took_s = waited_s(1)
    assert len(looks) <= took_s / 0.002 + 1
    assert all(gap >= 0.002 for gap in np.diff(looks))


def test_a_reader_waits_for_a_record_in_a_reused_slot(view):
    arrive(view, 0, 1, 2, 3)
    threading.Timer(0.01, lambda: (view.expect(4, 5), arrive(view, 4))).start()
    assert view.wait(4, 5, "KV", lambda: None) == 5


def test_a_record_whose_slot_was_reused_is_an_error(view):
    arrive(view, 0, 1, 2, 3)
    view.expect(4, 5)
    with pytest.raises(AlreadyTaken, match="KV: block 0 was taken before"):
        view.wait(0, 1, "KV", lambda: None)


@pytest.mark.parametrize("first", [0, 4])
def test_a_failed_record_is_an_error(view, first):
    view.fail()
    with pytest.raises(SaveFailed, match="KV: the source could not save it all"):
        view.wait(first, first + 1, "KV", lambda: None)
