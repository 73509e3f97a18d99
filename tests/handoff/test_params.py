import pytest

from baton.handoff import ports
from baton.handoff.config import HandoffConfig
from baton.handoff.errors import HandoffError, LeaseExpired, named
from baton.handoff.params import LoadWish, SaveWish, load_params, save_params, wish_of
from baton.handoff.reports import Costs, Problem
from baton.protos.handoff_pb2 import Manifest
from baton.services.config import HandoffSettings


def test_wishes_are_found_in_their_parameters():
    manifest = Manifest(request_id="r", epoch=3, num_tokens=7)
    assert wish_of(save_params(2)) == SaveWish(2)
    assert wish_of(load_params(3, 7, manifest)) == LoadWish(3, 7, manifest)
    assert wish_of(load_params(3, 7)) == LoadWish(3, 7, None)
    beginning = LoadWish(3, 7, manifest, "r/prefix")
    both = save_params(3, prefix=load_params(3, 7, manifest, "r/prefix"))
    assert wish_of(both) == SaveWish(3, prefix=beginning)
    assert wish_of(save_params(2, cached=True)) == SaveWish(2, cached=True)
    assert wish_of(None) is None
    assert wish_of({"do_remote_prefill": True}) is None


def config(**changes):
    """Return the configuration that a worker makes from its settings, with these changes."""
    settings = HandoffSettings(listen="127.0.0.1:0").connector
    return HandoffConfig.from_extra_config({"worker_id": "w", **settings, **changes})


def test_the_settings_are_the_connectors_configuration():
    made = config(transports=["tcp"], staging_mib=2)
    assert (made.transports, made.staging_mib, made.published_host) == (["tcp"], 2, "127.0.0.1")
    assert config().staging_mib is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"host": "0.0.0.0"}, "host is 0.0.0.0, which others cannot dial"),
        ({"host": "::"}, "host is ::, which others cannot dial"),
    ],
)
def test_the_configuration_is_checked(changes, text):
    with pytest.raises(HandoffError, match=text):
        config(**changes)


def test_each_rank_has_two_ports_of_its_own():
    assert [config(port=7402).port_of(rank) for rank in range(3)] == [7402, 7404, 7406]
    assert [config().port_of(rank) for rank in range(3)] == [0, 0, 0]
    firsts = [ports.first(7402, rank) for rank in range(3)]
    assert (
        {*firsts, *map(ports.for_records, firsts)} == set(ports.of_worker(7402, 3)) == set(range(7402, 7408))
    )
    assert ports.for_records(0) == len(ports.of_worker(0, 3)) == 0


def test_an_error_keeps_its_name_across_processes():
    problem = Problem.of(LeaseExpired("two\nlines"))
    assert problem == Problem("LeaseExpired", "two lines")
    assert isinstance(problem.to_error(), LeaseExpired)
    assert named("FromTheFuture") is HandoffError


def test_the_slowest_rank_counts():
    assert Costs.slowest([Costs(1, 5, 2, 0), Costs(3, 4, 1, 0)]) == Costs(3, 5, 2, 0)
