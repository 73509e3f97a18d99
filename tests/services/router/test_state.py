import sys
from dataclasses import replace

import pytest

from baton.services.router.errors import NotAdmitted, Overloaded
from baton.services.router.state import GROWTH, LOGPROB_BYTES, ROOM_TOKENS, Journal, RequestState


def request_state(name, prompt=100, max_tokens=1000):
    return RequestState(name, name, bytes(prompt), prompt, max_tokens, 2048, 0.0)


def test_the_journal_is_bounded_in_bytes():
    each = request_state("a").journal_bytes
    journal = Journal(3 * each)
    states = [request_state(str(number)) for number in range(4)]
    for state in states[:3]:
        journal.enter(state)
    assert (len(journal), journal.size) == (3, 3 * each)
    with pytest.raises(NotAdmitted, match="journal") as full:
        journal.enter(states[3])
    with pytest.raises(NotAdmitted, match="journal"):
        journal.check_room()  # the front end calls this before it renders
    assert (full.value.status, full.value.never) == (503, False)
    assert full.value.retry_after_s > 0
    journal.leave(states[0])
    journal.leave(states[0])
    journal.enter(states[3])
    for state in states:
        journal.leave(state)
    assert (len(journal), journal.size) == (0, 0)


def test_a_request_stays_within_its_place_in_the_journal():
    state = request_state("a", max_tokens=1900)
    journal = Journal()
    journal.enter(state)
    for token in range(1900):
        state.tokens.append(token)
        if state.outgrown:
            journal.grow(state)
        held = sys.getsizeof(state.tokens) + sys.getsizeof(state.engine_request)
        assert held < journal.size == state.journal_bytes
    journal.leave(state)
    assert journal.size == 0


def test_a_long_context_does_not_fill_the_journal_before_the_first_token():
    """Clients seldom limit the output; then the whole context length is allowed."""
    journal = Journal(1 << 20)
    for number in range(100):
        journal.enter(replace(request_state(str(number), max_tokens=131_072), max_model_len=131_072))


def test_log_probabilities_are_counted():
    plain, asked = request_state("a"), replace(request_state("b"), logprobs=21)
    assert asked.journal_bytes - plain.journal_bytes == 21 * ROOM_TOKENS * LOGPROB_BYTES
    asked = replace(request_state("b"), prompt_logprobs=3)
    assert asked.journal_bytes - plain.journal_bytes == 3 * LOGPROB_BYTES


def test_the_journal_is_bounded_while_answers_grow():
    states = [request_state(str(number), max_tokens=1900) for number in range(3)]
    journal = Journal(3 * states[0].journal_bytes)
    for state in states:
        journal.enter(state)

    def write(tokens):
        for state in states:
            state.tokens.extend(range(tokens))
            if state.outgrown:
                journal.grow(state)
            assert journal.size <= GROWTH * journal.limit

    write(300)
    assert journal.size > journal.limit  # they continue
    with pytest.raises(Overloaded, match="journal"):
        write(1500)
    with pytest.raises(NotAdmitted):
        journal.enter(request_state("late"))
