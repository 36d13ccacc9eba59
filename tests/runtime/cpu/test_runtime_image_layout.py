"""Copies between images as the outermost and as the innermost dimension in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_kernels

from torchcram.runtime.cpu.ops.image_layout import images_innermost, images_outermost

pytestmark = needs_kernels

lay_out = torch.ops.torchcram.lay_out_images
SIDES = st.integers(0, 40)


@given(st.tuples(st.integers(0, 90), SIDES, st.integers(0, 12), st.integers(0, 12)))
@pytest.mark.usefixtures("each_level")
def test_there_and_back(sizes):
    x = torch.randn(sizes)
    inner = lay_out(x, True)
    assert torch.equal(inner, x)
    assert inner.permute(2, 3, 1, 0).is_contiguous()
    outer = lay_out(inner, False)
    assert torch.equal(outer, x)
    assert outer.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("innermost", [False, True])
def test_any_strides_and_types(dtype, innermost):
    x = (100 * torch.randn(5, 18, 4, 7)).to(dtype).transpose(1, 3)[:, :, ::2]
    y = lay_out(x, innermost)
    assert torch.equal(y, x)
    assert (y.permute(2, 3, 1, 0) if innermost else y).is_contiguous()


def test_nothing_is_copied_without_need():
    x = torch.randn(20, 3, 4, 5)
    inner = images_innermost(x)
    assert images_innermost(inner) is inner
    assert images_outermost(x).data_ptr() == x.data_ptr()
    assert images_outermost(inner).is_contiguous()


def test_derivatives():
    x = torch.randn(3, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    for innermost in (False, True):
        assert torch.autograd.gradcheck(lambda x: lay_out(x, innermost), x)  # noqa: B023
        torch.library.opcheck(lay_out.default, (torch.randn(3, 2, 2, 3), innermost))
