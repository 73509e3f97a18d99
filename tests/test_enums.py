"""Names of roles."""

from baton.enums import role_name
from baton.protos import scheduler_pb2 as pb


def test_roles_have_short_names():
    assert [role_name(role) for role in (pb.ROLE_PREFILL, pb.ROLE_ENCODE)] == ["prefill", "encode"]
    assert role_name(pb.ROLE_UNSPECIFIED) == ""
