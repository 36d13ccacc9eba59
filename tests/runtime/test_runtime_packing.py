"""Packed matrices: what is refused, and that nothing that is accepted can do harm."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_library import needs_kernels
from sparse_cases import sparse_weight

from torchcram.runtime import ops  # noqa: F401  registers the operators
from torchcram.runtime.packing import (
    PAIRS,
    PATTERNS,
    Geometry,
    check_packed,
    pack_images,
    pack_linear,
)

pytestmark = needs_kernels


@pytest.mark.parametrize("form", [PAIRS, PATTERNS])
def test_truncated_foreign_and_altered_ones_are_refused(form):
    packed = pack_linear(sparse_weight(20, 200), form=form)
    check_packed(packed)
    for bad in (packed[:-64], packed[:40], torch.zeros(1000, dtype=torch.uint8), packed.float()):
        with pytest.raises(ValueError, match="no packed sparse matrix"):
            check_packed(bad.clone())
    for place in range(0, 72, 8):  # every number of the header
        bad = packed.clone()
        bad[place : place + 8] = 255
        with pytest.raises(ValueError, match="no packed sparse matrix"):
            check_packed(bad)


def test_rows_and_columns_outside_are_refused():
    packed = pack_linear(sparse_weight(20, 200), form=PAIRS)
    columns_at = int(packed[64:72].view(torch.int64))  # count, row, row, then columns
    for place in range(1, 5):
        bad = packed.clone()
        bad[columns_at : columns_at + 20].view(torch.int16)[place] = -64  # 65472
        with pytest.raises(ValueError, match="no packed sparse matrix"):
            check_packed(bad)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_accepted_stays_within_its_memory(data):
    torch.manual_seed(data.draw(st.integers(0, 3)))
    form = data.draw(st.sampled_from([PAIRS, PATTERNS]))
    packed = pack_linear(sparse_weight(9, 170), form=form)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, packed.numel() - 1))
        packed[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):  # refused
        check_packed(packed)
        torch.ops.torchcram.sparse_linear(torch.ones(3, 170), packed, None, None, 9, "none")


def test_a_matrix_for_panels_of_images_is_refused_elsewhere():
    packed = pack_images(sparse_weight(8, 64, 3, 3), Geometry((3, 3)))
    with pytest.raises(ValueError, match="does not map 576 features to 8"):
        torch.ops.torchcram.sparse_linear(torch.ones(3, 576), packed, None, None, 8, "none")


def test_bytes_per_kept_weight():
    weight = sparse_weight(768, 768, sparsity=0.9)
    assert pack_linear(weight).numel() < 6.6 * int(weight.count_nonzero())


def test_the_size_of_an_output():
    geometry = Geometry((3, 5), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    x = torch.empty(1, 1, 11, 12)
    conv = torch.nn.Conv2d(1, 1, (3, 5), (2, 1), (1, 0), (1, 2))
    assert geometry.output(11, 12) == tuple(conv(x).shape[2:])
