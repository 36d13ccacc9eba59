"""Packed matrices that change after they were checked: noticed where torch is, and never fatal."""

import contextlib
import copy
import ctypes
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_library import needs_kernels
from sparse_cases import sparse_weight

from torchcram.kernels.cpu.library import has_int8
from torchcram.runtime.cpu import packing
from torchcram.runtime.cpu.modules import (
    SparseConv2d,
    SparseFeedForward,
    SparseFeedForwardInt8,
    SparseLinear,
    SparseLinearInt8,
)
from torchcram.runtime.cpu.packing import PAIRS, QUAD_ROWS, Geometry, pack_images, pack_linear

pytestmark = needs_kernels

COLUMNS_AT = 8  # in the header


def made_here():
    return SparseLinear(torch.eye(16), None)


def assigned():
    layer = made_here()
    layer.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)
    return layer


def loaded():
    layer = made_here()
    layer.load_state_dict(SparseLinear(torch.ones(16, 16), None).state_dict())
    return layer


def set_directly():
    layer = made_here()
    layer.packed = layer.packed.clone()
    return layer


WAYS = {
    "made here": made_here,
    "copied": lambda: copy.deepcopy(made_here()),
    "pickled": lambda: pickle.loads(pickle.dumps(made_here())),  # noqa: S301
    "assigned": assigned,
    "loaded": loaded,
    "set directly": set_directly,
}


def alter(packed):
    packed[8 * COLUMNS_AT + 5] = 99


def alter_as_words(packed):
    packed.view(torch.int64)[COLUMNS_AT] = 1 << 45


@pytest.mark.parametrize("change", [alter, alter_as_words])
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("altered_inside", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_inference_mode(way, made_inside, altered_inside, change):
    x = torch.randn(2, 16)
    with torch.inference_mode(made_inside):
        layer = WAYS[way]()
        layer(x)
    if layer.packed.is_inference() and not altered_inside:
        return  # torch forbids to write to it
    with torch.inference_mode(altered_inside):
        change(layer.packed)
    for mode in (False, True):
        with (
            torch.inference_mode(mode),
            pytest.raises(ValueError, match="not a packed sparse matrix"),
        ):
            layer(x)


def test_layers_are_no_tensors_of_inference_mode():
    with torch.inference_mode():
        for way, make in WAYS.items():
            assert make().packed.is_inference() == (way == "set directly")


def test_a_tensor_of_inference_mode_is_looked_at_every_time(monkeypatch):
    looked, check = [], packing.check_packed
    monkeypatch.setattr(packing, "check_packed", lambda packed: looked.append(1) or check(packed))
    with torch.inference_mode():
        packed = pack_linear(torch.eye(16)).clone()
        for _ in range(3):
            torch.ops.torchcram.sparse_linear(torch.ones(1, 16), packed, None, None, 16, "none")
    assert len(looked) == 3


def test_a_layer_takes_a_matrix_that_lies_anywhere():
    layer, x = made_here(), torch.randn(2, 16)
    padded = torch.cat([torch.zeros(4, dtype=torch.uint8), layer.packed])
    odd = padded[4:] if padded.data_ptr() % 8 == 0 else padded[:-4]
    expected = layer(x)
    layer.load_state_dict({"packed": odd}, assign=True)
    assert torch.equal(layer(x), expected)
    layer.load_state_dict({"packed": odd})
    assert torch.equal(layer(x), expected)
    with pytest.raises(ValueError, match="aligned to 8 bytes"):
        torch.ops.torchcram.sparse_linear(x, odd, None, None, 16, "none")


@pytest.mark.parametrize("magic", [b"CRAM1\0\0\0", b"CRAM2\0\0\0"])
def test_a_matrix_of_an_earlier_version_says_so(magic):
    packed = pack_linear(torch.eye(16))
    packed[:8] = torch.tensor(list(magic), dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="not a packed sparse matrix: it was packed by an earlier version"
    ):
        packing.check_packed(packed)


def linear(layout):
    weight, bias = sparse_weight(21, 170), torch.randn(21)
    layer = SparseLinear(weight, bias)
    layer.packed = pack_linear(weight, layout=layout)
    return layer, torch.randn(70, 170)


def feed_forward(layout):
    (first, x), second = linear(layout), SparseLinear(sparse_weight(5, 21), torch.randn(5))
    second.packed = pack_linear(sparse_weight(5, 21), layout=layout)
    return SparseFeedForward(first, second, activation="gelu"), x


def convolution(layout, *, by_images):
    geometry = Geometry((3, 3), padding=(1, 1))
    weight = sparse_weight(9, 5, 3, 3)
    layer = SparseConv2d(weight, torch.randn(9), geometry, by_images=by_images)
    if by_images:
        layer.packed = pack_images(weight, geometry, layout=layout)
    else:
        layer.packed = pack_linear(weight, layout=layout)
    return layer, torch.randn(3, 5, 6, 5)


def int8_layers(_form):
    first = SparseLinearInt8(sparse_weight(21, 170), torch.randn(21))
    second = SparseLinearInt8(sparse_weight(5, 21), None)
    return SparseFeedForwardInt8(first, second, activation="relu"), torch.randn(70, 170)


LAYERS = {
    "linear": linear,
    "feed-forward": feed_forward,
    "pixels": lambda layout: convolution(layout, by_images=False),
    "images": lambda layout: convolution(layout, by_images=True),
    "int8": int8_layers,
}
if not has_int8():
    del LAYERS["int8"]


def parts_of(packed):
    """The places of the header and the tables, of the columns, and of all bytes."""
    columns_at, values_at = packed.view(torch.int64)[COLUMNS_AT:][:2].tolist()
    return range(columns_at), range(columns_at, values_at), range(packed.numel())


def write_unnoticed(packed, place, value):
    """Writes a byte behind the back of torch."""
    version = packed._version
    ctypes.c_uint8.from_address(packed.data_ptr() + place).value = value
    assert packed._version == version


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("layout", [PAIRS, QUAD_ROWS])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_written_unnoticed_does_not_lead_out_of_the_memory(name, layout):
    torch.manual_seed(0)
    layer, x = LAYERS[name](layout)
    if name == "int8" and not has_int8():
        pytest.skip("this machine has no kernels for 8 bits")

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.data())
    def alter_some(data):
        changed = copy.deepcopy(layer)
        changed(x)  # all is well, and known to be
        parts = [
            (packed, part)
            for key, packed in changed.named_buffers()
            if key.endswith("packed")
            for part in parts_of(packed)
        ]
        for _ in range(data.draw(st.integers(1, 6))):
            packed, part = data.draw(st.sampled_from(parts))
            value = data.draw(st.sampled_from([0, 1, 63, 64, 128, 255]))
            write_unnoticed(packed, data.draw(st.sampled_from(part)), value)
        with contextlib.suppress(ValueError):  # the header and the tables are looked at
            changed(x)

    alter_some()


@pytest.mark.parametrize("layout", [PAIRS, QUAD_ROWS])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "int8"])
def test_streams_of_the_largest_numbers(name, layout):
    layer, x = LAYERS[name](layout)
    layer(x)
    for key, packed in layer.named_buffers():
        if key.endswith("packed"):
            _, columns, _ = parts_of(packed)
            for number in (255, 128, 1):
                for place in columns:
                    write_unnoticed(packed, place, number)
                layer(x)  # wrong, and not fatal
