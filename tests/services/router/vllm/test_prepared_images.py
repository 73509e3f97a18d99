import json
import shutil
from dataclasses import replace

import pytest
from vllm.multimodal.inputs import PlaceholderRange

from baton.services.config import EngineSettings, Settings
from baton.services.engine import wire
from baton.services.router.errors import TooLarge, Unsupported
from baton.services.router.vllm import prepared_images
from baton.services.router.vllm.frontend import build_config
from baton.services.router.vllm.prepared_images import PreparedImages, places
from harness.architectures.registry import VISIONS
from harness.architectures.visions import token
from harness.pictures import noise
from tests.services.engine.test_images import feature


def name_in(folder, **extra):
    """Return what stands for the model in the names of its images."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = build_config(Settings(engine=EngineSettings(model=str(folder), extra=extra)))
    return str(MULTIMODAL_REGISTRY.create_processor(config.model_config).info.model_id)


def test_routers_name_images_alike_wherever_the_model_is(tmp_path):
    model = VISIONS["llava"]
    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    for folder in (here, there, other):
        shutil.copytree(model.target(model.checkpoint()), folder)
    settings = other / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"resample": 2}))
    assert name_in(here) == name_in(there) != name_in(other)
    assert name_in(here, mm_processor_kwargs={"do_resize": False}) != name_in(here)


def test_images_are_named_by_their_files_even_without_caches():
    model = VISIONS["llava"]
    folder, extra = str(model.target(model.checkpoint())), {"mm_processor_cache_gb": 0}
    engine = EngineSettings(model=folder, enable_prefix_caching=False, extra=extra)
    assert build_config(Settings(engine=engine)).cache_config.enable_prefix_caching


def test_images_beyond_the_limit_are_not_prepared(monkeypatch):
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    model = VISIONS["smolvlm"]
    folder = str(model.target(model.checkpoint()))
    config = build_config(Settings(engine=EngineSettings(model=folder))).model_config
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    prepared = []
    main = type(processor)._apply_hf_processor_main

    def counted(self, mm_items, hf_kwargs):
        prepared.append(mm_items.get_count("image", strict=False))
        return main(self, mm_items, hf_kwargs)

    monkeypatch.setattr(type(processor), "_apply_hf_processor_main", counted)

    def prepare(*seeds, cache):
        items = processor.info.parse_mm_data({"image": [noise(seed, (160, 40 * seed)) for seed in seeds]})
        inputs = ProcessorInputs([model_token] * len(seeds), items, cache=cache)
        return processor.apply(inputs, TimingContext(enabled=False))["mm_kwargs"]["image"]

    cache, model_token = MultiModalProcessorOnlyCache(config), token("<image>")
    one, other, again = prepare(1, 2, 1, cache=cache)
    assert sum(prepared) == 2
    assert [one, other, again] == list(prepare(1, 2, 1, cache=None))
    assert one == again != other
    size = sum(prepared_images._size(field.data) for each in (one, other) for field in each.values())
    monkeypatch.setattr(prepared_images, "MOST_BYTES", size)
    assert len(prepare(1, 2, 1, cache=cache)) == 3
    prepared.clear()
    with pytest.raises(ValueError, match=r"the first 2 images take .* fewer or smaller"):
        prepare(3, 4, 5, 6, 7, cache=cache)
    assert sum(prepared) == 2


PROMPT = range(100, 130)


async def test_requests_share_an_image():
    images = PreparedImages()
    features = [feature(2, 4, "a"), feature(8, 3, "b"), feature(20, 4, "a")]
    metadata, first = await images.split(features, PROMPT)
    assert [set(one.data) for one in metadata] == [{"image_grid_thw"}] * 3
    assert [one.identifier for one in first] == ["a", "b", "a"]
    assert first[2] is first[0]
    assert places(features) == (range(2, 6), range(8, 11), range(20, 24))
    _, second = await images.split(features[:1], PROMPT)
    assert second[0] is first[0]
    assert "pixel_values" in features[0].data
    alone = wire.decode_request(first[1].request)
    assert (first[1].tokens, alone.prompt_token_ids) == (3, [108, 109, 110])
    assert alone.mm_features == [replace(metadata[1], mm_position=PlaceholderRange(0, 3))]


async def test_what_cannot_be_sent_is_refused(monkeypatch):
    images = PreparedImages()
    for one in (replace(feature(2, 4), data=None), replace(feature(2, 4), modality="video")):
        with pytest.raises(Unsupported, match="only text and images"):
            await images.split([one], PROMPT)
    with pytest.raises(Unsupported, match="not a hash"):
        await images.split([feature(2, 4, "renderer0-mm-1-image-0")], PROMPT)
    await images.split([feature(2, 4, "adapter:0af9")], PROMPT)
    monkeypatch.setattr(prepared_images, "MOST_BYTES", 10)
    with pytest.raises(TooLarge, match="fewer or smaller"):
        await images.split([feature(2, 4)], PROMPT)
