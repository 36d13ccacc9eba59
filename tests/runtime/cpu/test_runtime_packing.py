"""Packed matrices: what is refused, and that nothing that is accepted can do harm."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_library import needs_kernels
from sparse_cases import sparse_weight

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu import ops, packing  # noqa: F401  registers the operators
from torchcram.runtime.cpu.packing import (
    PAIRS,
    QUAD_ROWS,
    Geometry,
    check_packed,
    convolution_struct,
    pack_images,
    pack_linear,
)

pytestmark = needs_kernels


@pytest.mark.parametrize("layout", [PAIRS, QUAD_ROWS])
def test_truncated_foreign_and_altered_ones_are_refused(layout):
    packed = pack_linear(sparse_weight(20, 200), layout=layout)
    check_packed(packed)
    for bad in (
        packed[:-64],
        packed[:40],
        packed.to("meta"),
        torch.zeros(1000, dtype=torch.uint8),
        packed.float(),
    ):
        with pytest.raises(ValueError, match="not a packed sparse matrix"):
            check_packed(bad.clone())
    for place, number in itertools.product(range(10), [-1, -64, 1 << 45]):  # all of the header
        bad = packed.clone()
        bad.view(torch.int64)[place] = number
        with pytest.raises(ValueError, match="not a packed sparse matrix"):
            check_packed(bad)


# Counts, rows, then columns.
@pytest.mark.parametrize(("layout", "places"), [(PAIRS, range(1, 5)), (QUAD_ROWS, range(2, 10))])
def test_rows_and_columns_outside_are_refused(layout, places):
    packed = pack_linear(sparse_weight(20, 200), layout=layout)
    columns_at = int(packed[64:72].view(torch.int64))
    for place in places:
        bad = packed.clone()
        bad[columns_at : columns_at + 20].view(torch.int16)[place] = -64  # 65472
        with pytest.raises(ValueError, match="not a packed sparse matrix"):
            check_packed(bad)


def test_rows_come_by_fours_where_they_share_columns_and_registers_are_many(each_level):
    for sparsity, shared in [(0.5, True), (0.95, False)]:
        packed = pack_linear(sparse_weight(64, 256, sparsity=sparsity))
        layout = int(packed.view(torch.int64)[4])
        many = each_level in ("avx512", "neon", "neon_dotprod")
        assert layout == (QUAD_ROWS if shared and many else PAIRS)


def test_what_rows_have_in_common_is_stored_once():
    alike = torch.zeros(64, 128)
    alike[:, :28] = 1
    apart = alike.gather(1, torch.rand(64, 128).argsort(1))
    columns = []
    for weight in (alike, apart):
        header = pack_linear(weight, layout=QUAD_ROWS).view(torch.int64)
        columns.append((int(header[9]) - int(header[8])) / 2)
    assert columns[0] < 0.75 * 64 * 28 < columns[1]  # 10 for 16 weights at best


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_accepted_stays_within_its_memory(data):
    torch.manual_seed(data.draw(st.integers(0, 3)))
    layout = data.draw(st.sampled_from([PAIRS, QUAD_ROWS]))
    packed = pack_linear(sparse_weight(9, 170), layout=layout)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, packed.numel() - 1))
        packed[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):  # refused
        torch.ops.torchcram.sparse_linear(torch.ones(3, 170), packed, None, None, 9, "none")


def test_a_matrix_for_panels_of_images_is_refused_elsewhere():
    packed = pack_images(sparse_weight(8, 64, 3, 3), Geometry((3, 3)))
    with pytest.raises(ValueError, match="does not map 576 features to 8"):
        torch.ops.torchcram.sparse_linear(torch.ones(3, 576), packed, None, None, 8, "none")


OPERATORS = torch.ops.torchcram
CALLS = {
    "linear": lambda p: OPERATORS.sparse_linear(torch.ones(1, 16), p, None, None, 16, "none"),
    "first": lambda p: OPERATORS.sparse_feed_forward(
        torch.ones(1, 16), p, None, "relu", pack_linear(torch.eye(16)), None, None, 16
    ),
    "second": lambda p: OPERATORS.sparse_feed_forward(
        torch.ones(1, 16), pack_linear(torch.eye(16)), None, "relu", p, None, None, 16
    ),
    "convolution": lambda p: OPERATORS.sparse_conv2d(
        torch.ones(1, 16, 1, 1), p, None, None, 16, [1, 1, 1, 1, 0, 0, 1, 1], False, False
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_operators_refuse_what_is_no_packed_matrix(call):
    packed = pack_linear(torch.eye(16))
    torch.testing.assert_close(call(packed).flatten(), torch.ones(16))
    far = packed.clone()
    far.view(torch.int64)[8] = 1 << 45  # where the columns begin
    strided = torch.stack([packed, packed], 1)[:, 0]
    for bad in (far, strided, packed[:-64], torch.zeros(4, dtype=torch.uint8), packed.float()):
        with pytest.raises(ValueError, match="not a packed sparse matrix"):
            call(bad)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_matrix_that_was_good_is_refused_once_it_is_altered(call):
    packed = pack_linear(torch.eye(16))
    call(packed)
    packed.view(torch.int64)[8] = 1 << 45
    with pytest.raises(ValueError, match="not a packed sparse matrix"):
        call(packed)


def test_a_matrix_in_the_memory_of_another_is_looked_at_again():
    for _ in range(20):  # the allocator gives the same memory again
        packed = pack_linear(torch.eye(16))
        CALLS["linear"](packed)
        del packed
        bad = pack_linear(torch.eye(16)).bitwise_or(128)
        with pytest.raises(ValueError, match="not a packed sparse matrix"):
            CALLS["linear"](bad)
        del bad


def test_a_matrix_is_looked_at_once(monkeypatch):
    looked = []
    monkeypatch.setattr(packing, "check_packed", lambda packed: looked.append(packed.numel()))
    with torch.inference_mode():
        inference = pack_linear(torch.eye(16))
    for packed in (pack_linear(torch.eye(16)), inference):
        looked.clear()
        for _ in range(3):
            CALLS["linear"](packed)
        assert len(looked) == 1
    assert inference in packing._rows
    before = len(packing._rows)
    del packed, inference
    assert len(packing._rows) == before - 1  # nothing stays of one that is gone


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (5,)])
def test_nothing_to_pack_is_refused(size):
    with pytest.raises(ValueError, match=r"weight of shape \(.*at least one"):
        pack_linear(torch.zeros(size))


def test_the_kernel_of_a_weight_is_that_of_its_geometry():
    for size, geometry in (((0, 4, 1, 1), (1, 1)), ((4, 0, 1, 1), (1, 1))):
        with pytest.raises(ValueError, match=r"weight of shape \(.*at least one"):
            pack_images(torch.zeros(size), Geometry(geometry))
    with pytest.raises(ValueError, match=r"kernel of \(3, 3\).* \(4, 4, 1, 1\)"):
        pack_images(torch.ones(4, 4, 1, 1), Geometry((3, 3)))


def test_the_compiled_packer_refuses_nothing_itself():
    call = kernels().torchcram_pack_linear
    one = torch.ones(1)
    for rows, inner, block in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1), (1, -1, 1)):
        assert call(one.data_ptr(), rows, inner, PAIRS, block, None, 0) == -1
    shape = convolution_struct(Geometry((1, 1)), 1, 1, (1, 1), (1, 1))
    call = kernels().torchcram_pack_images
    assert call(one.data_ptr(), 1, PAIRS, shape, None, 0) > 0
    for place in (1, 4, 5, 7, 11):  # channels, kernel, stride, dilation
        bad = type(shape)(*shape)
        bad[place] = 0
        assert call(one.data_ptr(), 1, PAIRS, bad, None, 0) == -1


def test_bytes_per_kept_weight():
    weight = sparse_weight(768, 768, sparsity=0.9)
    assert pack_linear(weight).numel() < 6.6 * int(weight.count_nonzero())


def test_the_size_of_an_output():
    geometry = Geometry((3, 5), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    x = torch.empty(1, 1, 11, 12)
    conv = torch.nn.Conv2d(1, 1, (3, 5), (2, 1), (1, 0), (1, 2))
    assert geometry.output(11, 12) == tuple(conv(x).shape[2:])
