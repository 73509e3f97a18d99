"""The CPU's and the GPU's form against the naive one, bit by bit; without a GPU the kernel is interpreted."""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from baton.kernels import kv_pack
from baton.kernels.kv_pack import SCALE_BYTES, WIRE_DTYPES, KVTable, Place
from baton.kernels.kv_pack.table import TableColumn
from tests.kernels.kv_pack import naive
from tests.kernels.kv_pack.layers import BF16, BLOCKS, CACHES, FP16, FP32, Layer, made, same

_seeds = itertools.count()
# The interpreter takes seconds for each block of these; the others have all of ORDER.
ORDER = [3, 0, 9, 4]
FEWER = {"gqa": [9, 0], "mla": [7], "mixed, with gaps": [7], "more than a tile": [7]}
ERRORS = {"fp8_e4m3": 2.0**-4, "int8": 0.5 / 127}  # relative to the value, and to the row's largest
SLACK = 1.001 + 2.0**-8  # allows for the rounding to bfloat16


@dataclass(frozen=True)
class Way:
    device: str
    pack: Callable[..., None]
    unpack: Callable[..., None]


@pytest.fixture(params=["cpu", "gpu"])
def way(request, device):
    if request.param == "cpu":
        return Way("cpu", kv_pack.pack, kv_pack.unpack)
    kernel = importlib.import_module("baton.kernels.kv_pack.gpu")
    return Way(device, kernel.pack, kernel.unpack)


@dataclass
class Packed:
    table: KVTable
    ids: torch.Tensor
    records: torch.Tensor
    digests: torch.Tensor

    @property
    def found(self):
        """Records and digests in the form of naive.pack."""
        values = self.digests.cpu().numpy().view(np.uint64)
        return [bytes(record) for record in self.records.cpu().numpy()], [int(value) for value in values]


def packed(way, blocks, widths, wire, ids):
    table = KVTable(blocks, widths, wire)
    records = torch.full((len(ids), table.record_bytes), 0xA5, dtype=torch.uint8, device=way.device)
    digests = torch.full((len(ids),), -0x5A5A5A5A5A5A5A5A, device=way.device)
    result = Packed(table, torch.tensor(ids, device=way.device), records, digests)
    way.pack(table, result.ids, records, digests)
    return result


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("name", CACHES)
def test_packing_and_unpacking_match_the_naive_form(way, name, wire):
    layers, order = CACHES[name], FEWER.get(name, ORDER)
    widths = [layer.width for layer in layers]
    blocks = made(layers, next(_seeds), way.device)
    before = [layer.clone() for layer in blocks]
    result = packed(way, blocks, widths, wire, order)
    expected = naive.pack([layer.cpu() for layer in blocks], widths, wire, order)
    assert result.found == expected
    assert same(blocks, before)

    targets = [(block + 4) % BLOCKS for block in order]
    targets[1:2] = [-1] * len(targets[1:2])  # skip the second block
    ours, plain = ([layer.poisoned(where) for layer in layers] for where in (way.device, "cpu"))
    digests = torch.full_like(result.digests, 7)
    ids = torch.tensor(targets, device=way.device)
    way.unpack(KVTable(ours, widths, wire), result.records, ids, digests)
    naive.unpack(expected[0], widths, wire, targets, plain)
    assert same(ours, plain)
    assert torch.equal(digests, result.digests)
    if wire == "auto":
        assert same([layer[targets[0]] for layer in ours], [layer[order[0]] for layer in blocks])


@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_parts_of_another_tables_records_are_unpacked(way, wire):
    """Unpack the second half of each layer into blocks of half the size, and drop the rest."""
    layers = [Layer((4, 16, 2 * 32), 32, BF16), Layer((4, 16, 2 * 64), 64, FP32)]
    widths = [layer.width for layer in layers]
    result = packed(way, made(layers, next(_seeds), way.device), widths, wire, [3, 0])
    whole = [layer.poisoned("cpu") for layer in layers]
    naive.unpack(result.found[0], widths, wire, [1, 2], whole)

    halves = [torch.full_like(layer[:, ::2], 7).to(way.device).contiguous() for layer in whole]
    places, rest = [], []
    for row, layer in zip(result.table.columns, halves, strict=True):
        offset, scales = int(row[TableColumn.OFFSET]), int(row[TableColumn.SCALES])
        half, scaled = int(row[TableColumn.SIZE]) // 2, int(row[TableColumn.ROWS]) // 2 * SCALE_BYTES
        if scales:
            half = layer.shape[1]
            rest.append((scales, scaled))
        places.append(Place(offset + half, scales + scaled))
        rest.append((offset, half))
    nowhere = [torch.zeros(size, dtype=torch.uint8, device=way.device).expand(BLOCKS, -1) for _, size in rest]
    places += [Place(offset) for offset, _ in rest]
    own_widths = [*widths, *(1 for _ in rest)]
    table = KVTable([*halves, *nowhere], own_widths, wire, places, result.table.record_bytes)
    digests = torch.empty_like(result.digests)
    way.unpack(table, result.records, torch.tensor([1, 2], device=way.device), digests)
    assert torch.equal(digests, result.digests)
    for layer, all_of_it in zip(halves, whole, strict=True):
        assert torch.equal(layer[1:3].cpu(), all_of_it[1:3, layer.shape[1] :])
        assert (layer[[0, 3]] == 7).all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("wire", ERRORS)
def test_errors_are_within_the_formats_bounds(way, wire, dtype):
    """An off-by-one in a row, a scale or a code would cause much larger errors."""
    layer = Layer((3, 16, 2 * 64), 64, dtype)
    blocks = made([layer], next(_seeds), way.device)
    result = packed(way, blocks, [64], wire, [4])
    there = [layer.poisoned(way.device)]
    way.unpack(
        KVTable(there, [64], wire), result.records, torch.tensor([4], device=way.device), result.digests
    )
    was, is_now = (one[0][4].cpu().float().reshape(-1, 64) for one in (blocks, there))
    most = was.abs().amax(dim=1, keepdim=True)
    error = (is_now - was).abs()
    if wire == "int8":
        assert (error <= ERRORS[wire] * most * SLACK + was.abs() * 2.0**-8).all()
    else:
        assert (error <= ERRORS[wire] * was.abs() * SLACK + most * 2.0**-10 / 448).all()
    assert (error.amax(dim=1) > most[:, 0] * 1e-4).float().mean() > 0.9  # it was quantised


def test_infinities_and_nan_spoil_their_row_alone(way):
    for wire, bad in itertools.product(("fp8_e4m3", "int8"), (float("inf"), float("nan"))):
        blocks = [torch.ones(2, 4 * 16, device=way.device, dtype=BF16)]
        blocks[0][1, 18] = bad
        with np.errstate(all="ignore"):  # the interpreter computes with numpy
            result = packed(way, blocks, [16], wire, [1])
            there = [torch.zeros_like(blocks[0])]
            way.unpack(KVTable(there, [16], wire), result.records, result.ids, result.digests)
        rows = there[0][1].float().reshape(4, 16)
        assert not rows[1].isfinite().any()
        assert (rows[[0, 2, 3]] - 1).abs().max() < 0.01


def test_digests_detect_wrong_words(way):
    layers = CACHES["gqa"]
    widths = [layer.width for layer in layers]
    blocks = made(layers, next(_seeds), way.device)
    result = packed(way, blocks, widths, "auto", [3, 5])
    there = [layer.poisoned(way.device) for layer in layers]
    table = KVTable(there, widths)
    size = table.part_bytes[0]

    def digest_of(spoil):
        records, digests = result.records.clone(), torch.empty_like(result.digests)
        spoil(records[0])
        way.unpack(table, records, torch.tensor([0, 1], device=way.device), digests)
        return digests.tolist()

    def exchange(record, left, right, count):
        a, b = record[left : left + count].clone(), record[right : right + count].clone()
        record[left : left + count], record[right : right + count] = b, a

    right = result.digests.tolist()
    assert digest_of(lambda _: None) == right
    spoilt = [
        *(lambda record, bit=bit: record[8 * bit + 3].bitwise_xor_(1 << bit % 8) for bit in range(8)),
        lambda record: record[-1].bitwise_xor_(128),
        lambda record: exchange(record, 0, 8, 8),  # adjacent words
        lambda record: exchange(record, 64, 16 * 512, 64),
        lambda record: exchange(record, 0, size, size),  # two layers
        lambda record: record[size:].copy_(record[:-size].clone()),  # shifted by a layer
        lambda record: record[8:].copy_(record[:-8].clone()),  # shifted by a word
        lambda record: record[-size:].zero_(),  # cut off
        lambda record: record.zero_(),
    ]
    found = [digest_of(spoil) for spoil in spoilt]
    assert all(one[0] != right[0] and one[1] == right[1] for one in found)
    assert len({one[0] for one in found}) == len(found)


def test_digests_depend_on_the_position_of_a_word():
    """A plain sum or xor would not."""
    base = np.zeros((1, 64 * 8), np.uint8)
    seen = set()
    for at, value in itertools.product(range(64), (1, 0x80, 0xFF)):
        record = base.copy()
        record[0, 8 * at] = value
        digests = np.empty(1, np.uint64)
        kv_pack.digest(record, digests)
        assert int(digests[0]) == naive.digest(bytes(record[0]))
        seen.add(int(digests[0]))
    assert len(seen) == 64 * 3


def test_numpy_arrays_and_unaligned_memory():
    layers = CACHES["gqa"]
    blocks, widths = made(layers, next(_seeds), "cpu"), [layer.width for layer in layers]
    for wire in WIRE_DTYPES:
        table = KVTable(blocks, widths, wire)
        memory = np.full(2 * table.record_bytes + 3, 0xA5, np.uint8)
        records = memory[3:].reshape(2, -1)
        digests = np.empty(2, np.uint64)
        kv_pack.pack(table, np.array([4, 1]), records, digests)
        expected = naive.pack(blocks, widths, wire, [4, 1])
        assert ([bytes(one) for one in records], digests.tolist()) == expected
        assert (memory[:3] == 0xA5).all()
        there = [layer.poisoned("cpu") for layer in layers]
        records.flags.writeable = False
        kv_pack.unpack(KVTable(there, widths, wire), records, np.array([4, 1]), None)
        plain = [layer.poisoned("cpu") for layer in layers]
        naive.unpack(expected[0], widths, wire, [4, 1], plain)
        assert same(there, plain)


@pytest.mark.parametrize(
    ("blocks", "width", "wire", "text"),
    [
        (torch.zeros(3, 48, dtype=BF16), 16, "auto8", "unknown wire format 'auto8'; allowed: auto, fp8_e4m3"),
        (torch.zeros(3, 3, dtype=BF16), 1, "auto", "multiples of 8 bytes"),
        (torch.zeros(9, dtype=BF16)[1:].reshape(2, 4), 4, "auto", "multiples of 8 bytes"),
        (torch.zeros(3, 16, dtype=BF16)[:, ::2], 4, "auto", "one piece of memory"),
        (torch.zeros(3, 48, dtype=BF16), 16, "int8", "even number of rows"),
        (torch.zeros(3, 48, dtype=BF16), 12, "int8", "a multiple of 8 elements"),
        (torch.zeros(3, 48, dtype=BF16), 32, "int8", "even number of rows"),
        (torch.zeros(3, 32, dtype=torch.int16), 16, "fp8_e4m3", "no fp8_e4m3 is made of torch.int16"),
    ],
)
def test_layers_that_cannot_be_packed_are_refused(blocks, width, wire, text):
    with pytest.raises(ValueError, match=text):
        KVTable([blocks], [width], wire)


def test_buffers_of_wrong_shapes_are_refused():
    table = KVTable([torch.zeros(3, 32, dtype=BF16)], [16])
    ids, digests = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
    records = torch.zeros(2, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"2 blocks need records \[2, 64\]"):
        kv_pack.pack(table, ids, records[:, :56], digests)
    with pytest.raises(ValueError, match="2 blocks need"):
        kv_pack.unpack(table, records, ids, digests[:1])
