"""Few rows times 8 bits; interpreted where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from torchcram.kernels.cuda.int8 import COLUMNS, DEEP, LONG, MANY, ONE, ROWS, multiply_int8

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def check(rows, outputs, inputs, dtype, *, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype)
    values = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    values = values.to(DEVICE)
    scale = (torch.rand(outputs, generator=generator) + 0.1).to(DEVICE)
    added = torch.randn(outputs, generator=generator).to(DEVICE, dtype) if bias else None
    found = multiply_int8(x, values, scale, added)
    assert (found.shape, found.dtype) == ((rows, outputs), dtype)
    expected = x.double() @ values.double().t() * scale.double()
    if added is not None:
        expected += added.double()
    if expected.numel():
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert float(error) < 0.008  # the last digit of 16 bits


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, ROWS, ROWS + 1]),
    st.sampled_from([1, ONE + 1, COLUMNS[0], COLUMNS[0] + 1]),
    st.sampled_from([1, 31, DEEP, DEEP + 3]),
    st.booleans(),
    st.integers(0, 9),
)
def test_every_remainder_of_a_tile(rows, outputs, inputs, bias, seed):
    check(rows, outputs, inputs, torch.float16, bias=bias, seed=seed)


def test_many_outputs_take_wider_tiles():
    check(3, MANY + 1, 5, torch.float16, bias=True)


@pytest.mark.parametrize("inputs", [LONG, LONG + 1, 3])
def test_one_row_in_either_dtype(inputs):
    for dtype in (torch.bfloat16, torch.float16):
        check(1, 5, inputs, dtype, bias=True)


@pytest.mark.skipif(not ON_GPU, reason="tiles of bfloat16 are not interpreted right")
@pytest.mark.gpu
def test_several_rows_in_bfloat16():
    for rows in (2, 16, 64):
        check(rows, 700, 3000, torch.bfloat16, bias=True)


@pytest.mark.parametrize(("rows", "outputs"), [(0, 3), (3, 0)])
def test_nothing_gives_nothing(rows, outputs):
    check(rows, outputs, 4, torch.float16, bias=False)


def test_no_inputs_leave_the_bias():
    found = multiply_int8(
        torch.ones(2, 0, dtype=torch.float16, device=DEVICE),
        torch.ones(3, 0, dtype=torch.int8, device=DEVICE),
        torch.ones(3, device=DEVICE),
        torch.arange(3.0, device=DEVICE).half(),
    )
    assert found.tolist() == [[0.0, 1.0, 2.0]] * 2
