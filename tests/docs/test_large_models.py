"""Each command of docs/large-models.md starts what its comment says, by Baton's own command line and plan."""

import re
import shlex
from collections import Counter

import pytest
from typer.testing import CliRunner

from baton import addresses
from baton.security.exposure import only_from_here
from baton.services import roles
from baton.services.cli import node, up
from baton.services.cli.main import app
from baton.services.decode.proposers import validation
from baton.services.engine.args import check_model
from baton.services.fleet import devices
from baton.services.fleet.places import Plan, places_of
from baton.services.fleet.supervisor import Fleet
from tests.docs.pages import PAGES

COMMAND = re.compile(r"^baton (up|node) (.*?) +# (.*: .*)$", re.MULTILINE)


def commands():
    _, *sections = re.split(r"^## ", PAGES["docs/large-models.md"].text, flags=re.MULTILINE)
    for section in sections:
        gpus = 8 if "8 GPUs each" in section.partition("\n")[0] else 16
        yield from ((f"{name} {words}", starts, gpus) for name, words, starts in COMMAND.findall(section))


COMMANDS = list(commands())


class Reached(Exception):
    """Raised instead of starting processes."""

    def __init__(self, settings, fleet):
        self.settings, self.fleet = settings, fleet


@pytest.mark.parametrize(("command", "starts", "gpus"), COMMANDS, ids=[starts for _, starts, _ in COMMANDS])
def test_a_command_starts_what_it_says(command, starts, gpus, monkeypatch):
    def reached(settings, fleet, *_, **_more):
        raise Reached(settings, fleet or Fleet.of(None, None, 0))

    monkeypatch.setattr(up, "run_up", reached)
    monkeypatch.setattr(node, "run", reached)
    monkeypatch.setattr(devices, "cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    found = CliRunner().invoke(app, shlex.split(command)).exception
    assert isinstance(found, Reached), found
    plan = Plan(found.settings, found.fleet.roles)
    shares = []

    def worker(_settings):
        return lambda _name, _role, where: shares.append(where.gpus)

    places_of([plan], worker)  # raises for too few GPUs
    assert Counter(gpu for own in shares for gpu in own) == Counter(map(str, range(gpus)))
    assert words(plan) == starts
    if plan.settings.engine.nodes > 1:
        assert not only_from_here(addresses.split(plan.settings.worker.listen)[0])


def words(plan):
    parts = []
    for role, number in Counter(plan.roles).items():
        engine = plan.settings_of(role).engine
        check_model(engine)
        validation.check(engine)
        roles.check(roles.role(role), plan.settings_of(role))
        size, each = engine.data_parallel_size, engine.data_parallel_size * engine.ranks
        said = [f"gang of {size}"] if size > 1 else []
        machines = f" on {engine.nodes} machines" if engine.nodes > 1 else ""
        said.append(f"{each} GPUs{machines}" + (" each" if number > 1 else ""))
        said += ["drafts"] if engine.speculative_config else []
        parts.append(f"{f'{number} ' if number > 1 else ''}{role}: {', '.join(said)}")
    return "; ".join(parts)


def test_the_page_has_them():
    assert len(COMMANDS) > 10
