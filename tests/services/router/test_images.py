"""Images as a router counts and sends them."""

from __future__ import annotations

import pytest

from baton.services.router.errors import NotAdmitted
from baton.services.router.images import Image, Sent
from baton.services.router.state import Journal
from tests.services.router.test_state import request_state

A, B = Image("a", b"a" * 100_000), Image("b", b"b" * 50_000)


def test_a_stream_forgets_what_its_worker_may_have_dropped() -> None:
    sent = Sent(limit=200_000)
    assert [sent.add(one) for one in (A, B, A)] == [True, True, False]
    assert sent.add(Image("c", b"c" * 100_000))  # B was used before A
    assert [sent.add(one) for one in (A, B)] == [False, True]
    sent.forget_all([A])
    assert sent.add(A)


def test_a_journal_counts_an_image_once() -> None:
    journal = Journal()
    one, two = request_state("one"), request_state("two")
    one.images, two.images = (A, B), (A,)
    each = one.journal_bytes
    journal.enter(one)
    journal.enter(two)
    assert journal.size == 2 * each + A.size + B.size
    journal.enter(two)  # again
    journal.leave(one)
    journal.leave(one)
    assert journal.size == each + A.size
    journal.leave(two)
    assert journal.size == 0


def test_images_have_no_room_beyond_the_journal() -> None:
    state = request_state("one")
    journal = Journal(state.journal_bytes + A.size)
    state.images = (A, B)
    with pytest.raises(NotAdmitted, match="fewer or smaller images"):
        journal.enter(state)
    state.images = (A,)
    journal.enter(state)
    with pytest.raises(NotAdmitted, match="journal is full"):
        journal.enter(request_state("two"))
