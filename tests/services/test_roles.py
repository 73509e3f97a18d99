"""Roles are found by name."""

import pytest

from baton.services import roles
from baton.services.config import load
from baton.services.errors import ConfigError


def test_encode_workers_need_images():
    roles.check(roles.ENCODE, load({}))
    with pytest.raises(ConfigError, match=r"^engine\.extra\.language_model_only"):
        roles.check(roles.ENCODE, load({"engine": {"extra": {"language_model_only": True}}}))


def test_an_encode_worker_has_one_rank_and_no_language_model():
    engine = {"tensor_parallel_size": 2, "expert_parallel": True, "speculative_config": {"method": "ngram"}}
    own = roles.encoder_settings(load({"engine": engine, "worker": {"gang": "g"}}))
    assert (own.engine.ranks, own.engine.members, own.worker.gang) == (1, 1, "")
    assert (own.engine.speculative_config, own.engine.enable_prefix_caching) == (None, False)


def test_an_unknown_name_lists_the_known_ones():
    said = r"did you mean 'decode'\?; allowed: prefill, decode, mixed, encode"
    with pytest.raises(ConfigError, match=said):
        roles.role("decoder")


def test_ranks_on_several_machines_must_be_allowed():
    engine = {"nodes": 2, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"set security\.plain_ranks \(--security-plain-ranks\)$"):
        roles.check(roles.MIXED, load({"engine": engine}))
    security = {"plain_ranks": True}
    roles.check(roles.MIXED, load({"engine": engine, "security": security, "fleet": {"node_rank": 1}}))
    with pytest.raises(ConfigError, match=r"^fleet\.node_rank \(value 2\): .* machines are 0 to 1$"):
        roles.check(roles.MIXED, load({"engine": engine, "security": security, "fleet": {"node_rank": 2}}))


@pytest.mark.parametrize("engine", [{}, {"tensor_parallel_size": 3}, {"data_parallel_size": 3}])
def test_machines_get_equal_parts(engine):
    with pytest.raises(ConfigError, match=r"^engine\.nodes \(value 2\): .* evenly among 2 machines$"):
        roles.check(roles.MIXED, load({"engine": {"nodes": 2} | engine, "security": {"plain_ranks": True}}))
