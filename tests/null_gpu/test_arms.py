"""Every way to serve on a GPU: answers are complete, and use the arm's transport and drafts."""

import pytest

from tests.null_gpu.arms import ALL, LONG, V1, wishes

# The kernel's counts limit synchronous matches, and the null GPU counts none.
DRAFTING = [name for name, arm in ALL.items() if arm["engine"]["speculative_config"] and name != "sync-ngram"]
PAIRS = [name for name, arm in ALL.items() if arm["workers"].get("decode")]
KILLED = [name for name, arm in ALL.items() if arm["workers"].get("decode", 0) > 1]

pytestmark = pytest.mark.timeout(600)


def report_of(name, request):
    found = request.getfixturevalue("on_v1" if name in V1 else "on_v2")
    assert name not in found.failed, found.failed[name]
    return found.reports[name], ALL[name]


@pytest.mark.parametrize("name", ALL)
def test_every_answer_has_the_expected_tokens(name, request):
    report, arm = report_of(name, request)
    assert not report.wrong
    assert report.answers == 2 * len(wishes(arm))


@pytest.mark.parametrize("name", PAIRS)
def test_every_handoff_uses_the_arms_transport(name, request):
    report, arm = report_of(name, request)
    transport = arm["handoff"].get("transports", ["shm"])[0]
    assert report.handoffs["loaded"] == {transport: report.answers}


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_are_made_and_accepted(name, request):
    report, _ = report_of(name, request)
    assert 0 < report.drafts["accepted"] <= report.drafts["drafted"]


@pytest.mark.parametrize("name", KILLED)
def test_an_answer_continues_after_its_worker_was_killed(name, request):
    report, _ = report_of(name, request)
    at = int(report.continued.partition(" ")[0])
    assert 0 < at < LONG
    assert not report.wrong
