"""deploy/two-machines.yaml with the configuration of docs/gangs.md: each machine runs its members."""

import os
import re
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import yaml

from baton.services import roles
from baton.services.config import load
from baton.services.fleet.places import Plan, members_of
from baton.services.worker.gang import is_limb
from harness.support import ROOT
from tests.docs.pages import PAGES
from tests.docs.test_commands import check_baton

FILE = ROOT / "deploy" / "two-machines.yaml"


def services(**environment):
    """Return the services, with ${NAME:-default} replaced."""
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda found: environment.get(found[1]) or found[2], FILE.read_text()
    )
    return yaml.safe_load(text)["services"]


@pytest.fixture
def config(tmp_path):
    """The page's configuration, which is the same on both machines."""
    (text,) = [one.text for one in PAGES["docs/gangs.md"].blocks if one.language == "yaml"]
    path = tmp_path / "baton.yaml"
    path.write_text(text)
    return path


@contextmanager
def settings(service, config):
    environment = {name: str(value) for name, value in service["environment"].items()}
    assert environment["BATON_CONFIG"] in {one.split(":")[1] for one in service["volumes"]}
    with patch.dict(os.environ, environment | {"BATON_CONFIG": str(config)}, clear=True):
        yield load()


@pytest.mark.parametrize(("rank", "decodes", "limb"), [(0, range(8), False), (1, range(8, 16), True)])
def test_a_machine_runs_its_members(config, rank, decodes, limb):
    node = services(NODE_RANK=str(rank))["node"]
    with settings(node, config) as found:
        plan = Plan(found, ["prefill", "decode"])
        for role in plan.roles:
            roles.check(roles.role(role), plan.settings_of(role))
        (prefill,) = members_of("prefill-0", plan.settings_of("prefill")).values()
        decode = members_of("decode-0", plan.settings_of("decode"))
    assert (prefill.engine.local_ranks, is_limb(prefill)) == (8, limb)
    assert list(decode) == [f"decode-0.r{one}" for one in decodes]
    assert "profiles" not in node


def test_commands_and_settings_of_all_services(config):
    for name, one in services().items():
        assert one["network_mode"] == "host"
        assert (ROOT / "deploy" / one["build"]["context"] / one["build"]["dockerfile"]).is_file()
        check_baton(one["command"][1:], whole=True)
        with settings(one, config) as found:
            assert found.security.insecure, name
    first = {name for name, one in services().items() if "first" in one.get("profiles", ())}
    assert first == {"scheduler", "router"}
