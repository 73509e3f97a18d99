"""Embeddings from an encode-only engine, pulled by an engine that runs the prompts.

WHOLE_TABLE=1 runs all families.
"""

import os
import time
from dataclasses import replace

import numpy as np
import pytest

from baton.handoff.embeddings import Embeddings
from baton.handoff.errors import StagingFull
from baton.handoff.load.embeddings import EmbeddingPuller
from baton.handoff.save import sizing
from baton.handoff.transports.base import Cancellation
from baton.handoff.vllm.ec_connector import EMBEDDINGS, form_of, shelf_of
from baton.protos.handoff_pb2 import EmbeddingManifest
from baton.services.config import HandoffSettings
from baton.services.engine.build import image_connector
from baton.services.engine.patches import kept_images
from harness.architectures.registry import VISIONS
from harness.engines import Answer, EngineProcess
from harness.seeing import WRITTEN, add, alone, cold, fail_step, metadata, options, preempt, prompt

A, B = 1, 2  # images of one size
MODELS = list(VISIONS) if "WHOLE_TABLE" in os.environ else ["qwen2.5-vl"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return VISIONS[request.param]


@pytest.fixture(scope="module")
def encoder(model):
    with EngineProcess(encoding(model)) as one:
        yield one


@pytest.fixture(scope="module")
def engine(model):
    with EngineProcess(options(model, "prompts")) as one:
        yield one


def encoding(model):
    own = HandoffSettings(listen="127.0.0.1:0", transports=["shm", "tcp"])
    config = own.connector | {"worker_id": "encoder", "lease_s": 0.0}
    changes = {
        "kv_transfer_config": None,
        "ec_transfer_config": image_connector("ec_producer", config),
        "enable_prefix_caching": False,
    }
    return replace(options(model, "encoder", **changes), prepare=keep_8_mib)


def keep_8_mib():
    sizing.EMBEDDINGS_BYTES = 8 << 20


# In the encode worker's process.


def add_image(engine, feature):
    """Queue a request that has only one image; return its name and answer."""
    place = feature.mm_position
    only = replace(feature, mm_position=replace(place, offset=0))
    return add(engine, [5] * place.length, 1, features=[only])


def encoded(engine, mark, seeds):
    """Encode images, one request each. Return their names, numbers of embeddings and manifests."""
    found = []
    for feature in prompt(engine, mark, seeds)[1]:
        _, answer = add_image(engine, feature)
        engine.run()
        assert (answer.tokens, answer.finish_reason) == ([], "stop")
        shelf = shelf_of(engine.core.vllm_config)
        manifest = shelf.manifest(feature.identifier, feature.mm_position.get_num_embeds())
        found.append((feature.identifier, manifest.rows, manifest.SerializeToString()))
    return found


def computed_again(engine, mark):
    """Drop an image from the shelf, but not from vLLM's cache. Return whether a request brings it back."""
    [(name, rows, _)] = encoded(engine, mark, [A])
    shelf = shelf_of(engine.core.vllm_config)
    assert shelf is not None
    filler = Embeddings(np.zeros(8 << 20, np.uint8), 1, 1, "float32")
    with pytest.raises(StagingFull):
        shelf.put("filler", filler)  # headers take some of the 8 MiB
    while shelf.manifest(name, rows) is not None:
        shelf._drop_one()
    return bool(encoded(engine, mark, [A]))


def behind_a_failed_step(engine, mark):
    """Fail a step of an encode, and encode another image. Return whether it is on the shelf."""
    name, _ = add_image(engine, *prompt(engine, mark, [7])[1])
    assert fail_step(engine) == [name]
    return bool(encoded(engine, mark, [7]))


# In the process of the engine that runs prompts.


def pulled(engine, images, transport):
    puller = EmbeddingPuller("prompts", form_of(engine.core.vllm_config, ""), [transport])
    found = {}
    for name, rows, manifest in images:
        given = EmbeddingManifest.FromString(manifest), name, rows
        found[name], used = puller.pull(*given, Cancellation(time.monotonic() + 10))
        assert used == transport
    puller.close()
    return found


def answers(engine, mark, asked, images, transport, lost=False):
    """Answer prompts at once, with pulled embeddings and the images' metadata. lost: preempt them all."""
    brought, running = pulled(engine, images, transport), []
    for seeds in asked:
        ids, features = prompt(engine, mark, seeds)
        name = f"brought-{len(engine.answers)}"
        made = engine.made(name, ids, WRITTEN, features=metadata(features))
        setattr(made, EMBEDDINGS, {one.identifier: brought[one.identifier] for one in features})
        engine.answers[name] = answer = Answer()
        engine.core.add_request(made)
        running.append(answer)
    if lost:
        engine.run(lambda: all(len(one.tokens) >= 3 for one in running))
        preempt(engine)
    engine.run()
    cold(engine)
    return [(one.tokens, one.finish_reason) for one in running]


@pytest.fixture(scope="module")
def images(encoder, model):
    return encoder.call(encoded, model.mark, [A, B])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_answers_are_equal_to_one_engines(encoder, engine, model, images, transport):
    for asked in ([[A]], [[A, B]], [[B, A]], [[A, A]]):
        expected = engine.call(alone, model.mark, asked[0])
        assert engine.call(answers, model.mark, asked, images, transport) == [(expected, "length")]


def test_several_requests_with_the_same_image_at_once(engine, model, images):
    asked = [[A], [B, A], [A]]
    found = engine.call(answers, model.mark, asked, images, "shm")
    if model.dtype == "bfloat16":  # a batch is rounded differently
        assert [end for _, end in found] == ["length"] * 3
    else:
        assert found == [(engine.call(alone, model.mark, one), "length") for one in asked]


def test_a_preempted_request_loads_its_embeddings_again(engine, model, images):
    [(tokens, end)] = engine.call(answers, model.mark, [[A, B]], images, "shm", True)
    assert end == "length"
    if model.dtype != "bfloat16":  # tokens that are computed again are rounded differently
        assert tokens == engine.call(alone, model.mark, [A, B])


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="takes long")
def test_two_ranks_load_them(model, images):
    if model.name == "qwen3.5-vision":
        pytest.skip("vLLM cannot divide this checkpoint's states between two ranks")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with EngineProcess(replace(options(model, "ranks", **ranks), cores="0|1", prepare=several_ranks)) as two:
        for asked in ([[A]], [[A, B]], [[B], [A, B]]):
            found = two.call(answers, model.mark, asked, images, "shm")
            assert [end for _, end in found] == ["length"] * len(asked)
            if model.dtype != "bfloat16":  # rounded differently from run to run of a batch
                assert [tokens for tokens, _ in found] == [two.call(alone, model.mark, one) for one in asked]


def several_ranks():
    kept_images.several_ranks = True


def test_an_image_that_only_vllm_still_has_comes_to_the_shelf(encoder, model, images):
    assert encoder.call(computed_again, model.mark)


def test_an_encoder_survives_a_failed_step(encoder, model):
    assert encoder.call(behind_a_failed_step, model.mark)
