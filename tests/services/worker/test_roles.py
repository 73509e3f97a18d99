"""What a role is, and that a name finds it."""

from __future__ import annotations

import pytest

from baton.protos import scheduler_pb2
from baton.protos import worker_pb2 as pb
from baton.services.config import Settings
from baton.services.errors import ConfigError
from baton.services.worker import roles


@pytest.mark.parametrize(
    ("name", "wire", "phases"),
    [
        ("prefill", scheduler_pb2.ROLE_PREFILL, {pb.PHASE_PREFILL}),
        ("decode", scheduler_pb2.ROLE_DECODE, {pb.PHASE_DECODE}),
        ("mixed", scheduler_pb2.ROLE_MIXED, {pb.PHASE_PREFILL, pb.PHASE_DECODE}),
    ],
)
def test_a_name_finds_its_role(name: str, wire: int, phases: set[int]) -> None:
    role = roles.role(name)
    assert (role.name, role.wire, role.phases) == (name, wire, phases)


def test_a_worker_takes_more_than_the_scheduler_places() -> None:
    settings = Settings(engine={"max_num_seqs": 10}, scheduler={"max_queue_factor": 1.5})  # type: ignore[arg-type]
    assert roles.role("decode").max_requests(settings) == 25
    assert roles.role("mixed").max_requests(settings) > roles.role("prefill").max_requests(settings)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="decode, mixed, prefill"):
        roles.role("encode")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        roles.register("decode", "elsewhere", "X")
