"""An engine whose ranks are separate processes hands over to itself."""

import random
import ssl

import pytest
from cryptography import x509

from baton import addresses
from baton.security import identity
from baton.security.authority import Authority
from baton.security.names import Name, Role
from harness.engines import EngineProcess, Options, clear_prompt, decode, generate
from tests.handoff import checkpoints
from tests.handoff.engines import loaded_of, read

WRITTEN = 12
ENGINE = {
    "enable_prefix_caching": False,  # otherwise there would be nothing to pull
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
}

pytestmark = pytest.mark.timeout(300)


def test_each_rank_serves_and_pulls_its_own_shard_with_its_workers_certificate(tmp_path, model):
    folder = tmp_path / "identity"
    identity.write(folder, Authority.create(tmp_path / "ca").issue(Name("test", Role.WORKER, "both")))
    secured = Options(
        model, "both", cores="0|1", transports=("tcp",), handoff={"identity": str(folder)}, engine=ENGINE
    )
    with EngineProcess(secured) as engine:
        draw = random.Random(300)
        prompt = clear_prompt(engine, lambda: draw.choices(range(2, checkpoints.VOCAB), k=300), WRITTEN)
        expected = engine.call(generate, "alone", prompt, WRITTEN)
        manifest = read(engine, "over-tls", prompt)
        written = engine.call(decode, "over-tls", prompt, WRITTEN, manifest)
        assert written.tokens == expected
        loaded = loaded_of(written)
        assert (len(manifest.shards), loaded.blocks, loaded.transport) == (2, 10, "tcp")
        mine = x509.load_pem_x509_certificate((folder / identity.CHAIN).read_bytes())
        for shard in manifest.shards:
            shown = ssl.get_server_certificate(addresses.split(shard.address), timeout=10)
            assert x509.load_pem_x509_certificate(shown.encode()) == mine
        assert len({shard.address for shard in manifest.shards}) == 2
