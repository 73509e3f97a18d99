"""An encode worker computes images for a mixed worker, which pulls their embeddings and answers.

Runs with WHOLE_TABLE=1; tests/e2e/test_images.py does the same through a router.
"""

import asyncio
import itertools
import os
from dataclasses import dataclass, replace

import pytest
from vllm.v1.engine import FinishReason

from baton.protos import worker_pb2 as pb
from baton.protos import worker_pb2_grpc
from baton.protos.scheduler_pb2 import ROLE_ENCODE, ROLE_MIXED
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_ENCODE
from baton.rpc import aio_channel
from baton.security.names import Role
from baton.services.engine import wire
from baton.services.engine.images import metadata_of
from baton.services.router.images import Image
from harness.architectures.registry import VISIONS
from harness.seeing import prepared
from harness.support import eventually
from harness.workers import fleet
from tests.services.worker.router import KEY, Stream, connected, request

MODEL = VISIONS["qwen2.5-vl"]
A, B, C = 1, 2, 3
_names = itertools.count()

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="starts two workers"),
]


@dataclass
class Pair:
    encoder: Stream
    mixed: Stream


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encode")
    with fleet(MODEL.target(MODEL.checkpoint()), folder) as one:
        yield started(one)


def started(one):
    # what an encode worker leaves out of engine.*
    of_others = {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", **MODEL.spec}}
    small = {"baton.handoff.save.sizing:EMBEDDINGS_BYTES": 4 << 20}
    encoder = one.start("encode", small, engine=of_others)
    mixed = one.start("mixed", handoff={"enabled": False})
    for worker in (encoder, mixed):
        eventually(worker.serving, 120, f"{worker.name} serves")
    return encoder, mixed


@pytest.fixture
async def pair(workers):
    encoder, mixed = workers
    async with connected(encoder.address) as one, connected(mixed.address) as other:
        yield Pair(one, other)


@pytest.fixture(scope="module")
def config():
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(model=str(MODEL.target(MODEL.checkpoint()))).create_model_config()


def asked(config, *seeds):
    """Return a request with images as metadata, and the images' features."""
    ids, features = prepared(config, MODEL.mark, seeds)
    core = request(f"r{next(_names)}", ids, max_tokens=8)
    core.mm_features = [metadata_of(one) for one in features]
    return core, features


async def media(stream, feature):
    for part in Image(feature.identifier, b"".join(wire.encode_item(feature.data))).parts():
        await stream.send(part)


def encoding(feature, name, epoch=1):
    place = feature.mm_position
    core = request("image", [5] * place.length, max_tokens=1)
    core.mm_features = [metadata_of(replace(feature, mm_position=replace(place, offset=0)))]
    encoded = wire.encode_request(core)
    return pb.Start(request_id=name, epoch=epoch, phase=PHASE_ENCODE, engine_request=encoded, key=KEY)


async def encode(pair, feature, name):
    await media(pair.encoder, feature)
    got = await pair.encoder.run_raw(encoding(feature, name))
    assert got.saved is not None, got.failed
    assert got.saved.problem == ""
    return got


def brought(pair, core, names, phase=PHASE_DECODE, **source):
    """Return the Start of a prompt whose images come from encodes. names: the encodes' names, by image."""
    start = pb.Start(
        request_id=core.request_id, epoch=1, phase=phase, engine_request=wire.encode_request(core)
    )
    for image, name in names.items():
        given = {"worker_id": "e", "address": pair.encoder.address, "request_id": name, "key": KEY, **source}
        start.encoded.add(identifier=image, source=pb.Source(**given))
    return start


async def whole(pair, config, *seeds):
    core, features = asked(config, *seeds)
    for feature in features:
        await media(pair.mixed, feature)
    got = await pair.mixed.run(core, PHASE_DECODE)
    assert got.finish == FinishReason.LENGTH, got.failed
    return got.tokens


async def test_a_prompt_starts_once_its_embeddings_are_here(pair, config, workers):
    core, features = asked(config, A, B)
    names = {one.identifier: f"{core.request_id}/i{at}" for at, one in enumerate(features)}
    start = brought(pair, core, names)
    answer = asyncio.create_task(pair.mixed.run_raw(start))  # before the encodes
    for feature in features:
        await encode(pair, feature, names[feature.identifier])
    got = await answer
    assert got.finish == FinishReason.LENGTH, got.failed
    assert got.tokens == await whole(pair, config, A, B)
    encoder, mixed = workers
    assert mixed.figure("baton_worker_embeddings_loaded_total") == 2
    eventually(lambda: encoder.figure("baton_worker_embeddings_computed_total") >= 2, 10, "it tells")
    assert encoder.figure("baton_worker_embeddings_images") >= 2


async def test_an_image_again_comes_from_the_shelf(pair, config, workers):
    core, [feature] = asked(config, A)
    await encode(pair, feature, f"{core.request_id}/first")
    for name in ("second", "third"):
        got = await pair.encoder.run_raw(encoding(feature, f"{core.request_id}/{name}"))  # no Media
        assert got.saved.problem == ""
    got = await pair.mixed.run_raw(brought(pair, core, {feature.identifier: f"{core.request_id}/third"}))
    assert got.tokens == await whole(pair, config, A)
    eventually(
        lambda: workers[0].figure("baton_worker_embeddings_found_total") >= 2, 10, "it tells what it found"
    )


async def test_embeddings_and_images_in_one_prompt(pair, config):
    core, [one, other] = asked(config, A, C)
    await encode(pair, one, name := f"{core.request_id}/i0")
    start = brought(pair, core, {one.identifier: name})
    await media(pair.mixed, other)
    got = await pair.mixed.run_raw(start)
    assert got.tokens == await whole(pair, config, A, C), got.failed


async def test_roles_stay(workers):
    for worker, role in zip(workers, (ROLE_MIXED, ROLE_ENCODE), strict=True):
        async with aio_channel(worker.address, Role.WORKER) as channel:
            reply = await worker_pb2_grpc.WorkerStub(channel).SetRole(pb.SetRoleRequest(role=role), timeout=5)
        assert "cannot become" in reply.refusal
