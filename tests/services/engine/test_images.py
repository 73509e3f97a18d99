"""Images in a request for the engine: whole, as metadata, or refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from baton.handoff.embeddings import Embeddings
from baton.services.engine import images, wire


def item(value=1.0, height=2):
    pixels = MultiModalFieldElem(torch.full((4, 6), value), MultiModalBatchedField())
    grid = MultiModalFieldElem(torch.tensor([1, height, 2]), MultiModalBatchedField(keep_on_cpu=True))
    return MultiModalKwargsItem({"pixel_values": pixels, "image_grid_thw": grid})


def feature(offset, length, name="a", **changed):
    one = MultiModalFeatureSpec(item(), "image", name, PlaceholderRange(offset, length), name)
    return replace(one, **changed)


def test_an_image_whose_embeddings_are_here_stays_metadata():
    metadata, other = images.metadata_of(feature(0, 4)), images.metadata_of(feature(4, 4, "b"))
    found = {"a": Embeddings(np.zeros(64, np.uint8), 4, 4, "float32"), "b": item()}
    (one, two), missing = images.whole([metadata, other], found.get)
    assert (one, missing) == (metadata, "")
    assert set(two.data) == {"pixel_values", "image_grid_thw"}


def test_metadata_lack_the_pixels_alone():
    whole = feature(3, 4)
    metadata = images.metadata_of(whole)
    assert set(metadata.data) == {"image_grid_thw"}
    assert replace(metadata, data=None) == replace(whole, data=None)


def test_an_image_survives_the_wire():
    there = wire.decode_item(bytearray(b"".join(wire.encode_item(item(2.0)))))
    assert there == item(2.0)
    assert {name: one.field.keep_on_cpu for name, one in there.items()} == {
        "pixel_values": False,
        "image_grid_thw": True,
    }


@pytest.mark.parametrize("cut", [0, 1, 30, 100])
def test_unreadable_images_are_refused(cut):
    good = b"".join(wire.encode_item(item()))
    with pytest.raises(ValueError, match="hold no MultiModalKwargsItem"):
        wire.decode_item(bytearray(good[:cut] + b"\xc1" + good[cut + 1 : -1]))


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ([feature(0, 4), feature(4, 4)], ""),
        ([feature(6, 4)], ""),
        ([feature(7, 4)], "the prompt's end at 10"),
        ([feature(4, 4), feature(0, 4)], "overlap"),
        ([feature(0, 4), feature(3, 4)], "overlap"),
        ([feature(-1, 4)], "overlap"),
        ([feature(2, 0)], "overlap"),
        ([feature(0, 4, data=None)], "without metadata"),
        ([feature(0, 4, "")], "without a name"),
        ([feature(0, 4, modality="video")], "video is not served"),
        ([feature(0, 4, mm_position=PlaceholderRange(0, 4, torch.ones(3, dtype=torch.bool)))], "mask"),
    ],
)
def test_inconsistent_features_are_refused(features, said):
    found = images.problem(features, 10)
    assert found == said if not said else said in found


def test_images_are_filled_in_by_name():
    metadata = [images.metadata_of(feature(0, 4, name)) for name in "ab"]
    kept = {"a": item(1.0), "b": item(2.0)}
    filled, missing = images.whole(metadata, kept.get)
    assert ([one.data for one in filled], missing) == ([kept["a"], kept["b"]], "")
    filled, missing = images.whole(metadata, {"a": item()}.get)
    assert ([one.data for one in filled], missing) == ([item(), metadata[1].data], "b")
    other = MultiModalKwargsItem({"pixel_values": item()["pixel_values"]})  # of another kind of model
    assert images.whole(metadata, {"a": other}.get)[1] == "a"
    assert images.whole(metadata, {"a": item(height=4)}.get)[1] == "a"  # prepared in another way


@pytest.mark.parametrize(("tokens", "kept"), [(2, 0), (3, None), (5, None), (6, 1), (9, 1), (20, 2)])
def test_a_cut_divides_no_image(tokens, kept):
    found = images.before([feature(2, 4), feature(10, 4)], tokens)
    assert (found if found is None else len(found)) == kept
