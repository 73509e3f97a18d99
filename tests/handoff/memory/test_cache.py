import numpy as np
import pytest
import torch

from baton.handoff.errors import UnsupportedCache
from baton.handoff.memory.blocks import block_cache
from tests.handoff.caches import make_cache, mixed_cache, records, tensors

BLOCKS = 17
ORDERS = [[3], [1, 2, 3, 4], [9, 8, 7], [5, 6, 11, 12, 13, 2], list(range(1, BLOCKS))]


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_gathered_and_scattered(order):
    left, right = make_cache(BLOCKS, 1), make_cache(BLOCKS, 2)
    before = records(right, range(BLOCKS))
    sent = records(left, order)
    targets = [block % (BLOCKS - 1) + 1 for block in order]
    right.scatter(0, sent, targets)
    after = records(right, range(BLOCKS))
    for target, record in zip(targets, sent, strict=True):
        assert np.array_equal(after[target], record)
    untouched = [block for block in range(BLOCKS) if block not in targets]
    assert np.array_equal(after[untouched], before[untouched])


def test_the_null_block_is_never_written():
    cache = make_cache(BLOCKS, 1)
    before = records(cache, [0])
    sent = np.full((4, cache.record_bytes), 0xAB, np.uint8)
    cache.scatter(0, sent, [0, 1, 0, 2])
    assert np.array_equal(records(cache, [0]), before)
    assert (records(cache, [1, 2]) == 0xAB).all()


def test_a_record_is_each_layers_bytes_of_the_block_in_order():
    given = tensors(BLOCKS)
    cache = block_cache(given, BLOCKS)
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in given.values()]
    assert [layer.block_bytes for layer in cache.layers] == sizes
    record = records(cache, [5])[0]
    ordinary = given["model.layers.0.attn"][5].contiguous().view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(record[: sizes[0]], ordinary)
    assert cache.layers[1].block_shape == (2, 32, 128)
    assert cache.layers[1].block_strides == (128, 256, 1)  # tokens first: the hash must differ
    assert cache.layers[3].dtype == "float32"


def test_a_tensor_that_layers_share_counts_once():
    tensor = torch.zeros(BLOCKS, 2, 32, 64)
    assert len(block_cache({"a": tensor, "b": tensor}, BLOCKS).layers) == 1


def test_blocks_cut_into_pieces_by_a_kernel_are_whole_again():
    tensor = torch.arange(8 * 6).reshape(8, 2, 3)
    cache = block_cache({"a": tensor}, 4)
    assert cache.layers[0].block_shape == (2, 2, 3)
    assert np.array_equal(records(cache, [3])[0].view(np.int64), tensor[6:].reshape(-1).numpy())


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, BLOCKS, 4), "first dimension is not 17"),
        ([torch.zeros(BLOCKS, 4)], "is a list"),
        (torch.zeros(BLOCKS, 4, 8)[:, :, ::2], "not one piece"),
        (torch.zeros(BLOCKS, 3, dtype=torch.bfloat16), "multiples of 8 bytes"),
    ],
)
def test_other_layouts_are_refused_by_name(tensor, text):
    with pytest.raises(UnsupportedCache, match=text):
        block_cache({"layer.7": tensor}, BLOCKS)


def test_rows_are_heads_in_any_layout():
    """Quantised records of heads-first and tokens-first caches have the same rows, in memory order."""
    heads_first = torch.randn(BLOCKS, 4, 32, 2 * 64)
    tokens_first = heads_first.transpose(1, 2).contiguous().transpose(1, 2)
    made = [
        records(block_cache({"a": one}, BLOCKS, "int8", {"a": 64}), [5])[0]
        for one in (heads_first, tokens_first)
    ]
    rows = 4 * 32 * 2
    assert made[0].size == rows * (64 + 4)
    left, right = (one[: rows * 64].reshape(rows // 2, 2, 64) for one in made)
    assert np.array_equal(left.reshape(4, 32, 2, 64).swapaxes(0, 1).reshape(right.shape), right)


def test_layers_of_bytes_stay_as_they_are():
    given = {"fp8": torch.zeros(BLOCKS, 32, 656, dtype=torch.uint8), "wide": torch.zeros(BLOCKS, 2, 32, 64)}
    layers = block_cache(given, BLOCKS, "fp8_e4m3", {"fp8": 576, "wide": 32}).layers
    sizes = [layer.part_bytes(1, "fp8_e4m3") for layer in layers]
    assert sizes == [32 * 656, 2 * 32 * (64 + 2 * 4)]
    assert [layer.block_bytes for layer in layers] == [32 * 656, 2 * 32 * 64 * 4]


def test_heads_that_do_not_lie_side_by_side_are_refused():
    with pytest.raises(
        UnsupportedCache, match=r"8 elements are side by side.* Leave --kv-wire-dtype at auto"
    ):
        block_cache({"x": torch.zeros(BLOCKS, 4, 16, 32, 8)}, BLOCKS, "int8", {"x": 128})
    with pytest.raises(UnsupportedCache, match=r"no int8 is made of torch\.int32"):
        block_cache({"x": torch.zeros(BLOCKS, 4, 16, dtype=torch.int32)}, BLOCKS, "int8", {"x": 16})


def test_groups_share_memory():
    """All records have one size: smaller ones are padded with zeros, which are discarded."""
    left, right = mixed_cache(BLOCKS, 1), mixed_cache(BLOCKS, 2)
    assert [(layer.name, layer.group) for layer in left.layers] == [
        ("full.0", 0),
        ("full.1", 0),
        ("window.0", 1),
        ("window.1", 1),
        ("state.0", 2),
    ]
    full, state = records(left, [3], 0), records(left, [3], 2)
    assert full.shape == state.shape
    half = left.layers[-1].part_bytes(1, "auto")
    assert np.array_equal(state[:, :half], full[:, :half])
    assert not state[:, half:].any()
    assert np.array_equal(records(left, [3], 1), full)
    other = records(right, [5], 0)
    right.scatter(2, state, [5])
    assert np.array_equal(records(right, [5], 0), np.concatenate([state[:, :half], other[:, half:]], axis=1))
    assert np.array_equal(records(right, [5], 2), state)


def test_a_layer_of_no_group_reads_anothers_kv_or_is_refused():
    own, lost = torch.zeros(BLOCKS, 4, 16), torch.zeros(BLOCKS, 4, 16)
    groups = [["a"], ["b"]]
    assert len(block_cache({"a": own, "b": own, "reads-a": own}, BLOCKS, groups=groups).layers) == 2
    with pytest.raises(UnsupportedCache, match="layer c: its KV is in none of the 2 groups"):
        block_cache({"a": own, "b": own, "c": lost}, BLOCKS, groups=groups)
