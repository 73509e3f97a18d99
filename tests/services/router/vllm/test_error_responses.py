import time

import pytest
from vllm.entrypoints.serve.exception_handling import error_response

from baton.services.router.errors import MAX_TEXT, Unsupported
from baton.services.router.http.forms import error_response as own_response
from baton.services.router.vllm.error_responses import bound_error_texts


@pytest.mark.parametrize("unit", ["/a", "/home/x", ' File "', "\n", "a", "/a-b.c"])
def test_a_long_error_is_cut_and_costs_little(unit):
    bound_error_texts()
    bound_error_texts()
    began = time.thread_time()
    response = error_response.create_error_response(f"The model `{unit * 200_000}` does not exist.")
    assert time.thread_time() - began < 2.0  # 8 KB of "/a" took 4.7 s, and 32 KB minutes
    assert len(response.error.message) < MAX_TEXT + 100


def test_a_short_error_stays_as_it_is():
    bound_error_texts()
    response = error_response.create_error_response("no file /opt/models/a/config.json for `a/b`")
    assert response.error.message == "no file <path> for `a/b`"


def test_own_errors_are_cut():
    _, body = own_response(Unsupported("x" * 1_000_000))
    assert len(body["body"]) < MAX_TEXT + 200
    assert b"(1000000 characters)" in body["body"]
