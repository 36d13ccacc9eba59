"""Norms and products of rows: against float64 at every level of the instruction set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_kernels
from torch import nn
from torch.nn import functional

from torchcram.runtime.cpu.prompt_layers import (
    FusedRMSNorm,
    GatedFeedForward,
    fuse_prompt_layers_,
)

pytestmark = needs_kernels

norm, product = torch.ops.torchcram.rms_norm, torch.ops.torchcram.silu_and_mul


def expected_norm(x, weight, eps):
    x, weight = x.double(), weight.double()
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def error(found, expected):
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-6)).max())


@given(st.integers(1, 40), st.integers(1, 70), st.floats(-6, 6))
@pytest.mark.usefixtures("each_level")
def test_norms_of_any_size(rows, width, size):
    x, weight = torch.randn(rows, width) * 10**size, torch.randn(width)
    assert error(norm(x, weight, 1e-6), expected_norm(x, weight, 1e-6)) < 1e-5


@given(st.integers(1, 100), st.floats(-3, 2.5))
@pytest.mark.usefixtures("each_level")
def test_products_of_any_size(count, size):
    gate, up = torch.randn(count) * 10**size, torch.randn(count)
    expected = functional.silu(gate.double()) * up
    assert torch.allclose(product(gate, up).double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.usefixtures("each_level")
def test_threads_share_the_rows():
    x, weight = torch.randn(3, 400, 57), torch.randn(57)  # more than one thread takes at a time
    assert error(norm(x, weight, 1e-6), expected_norm(x, weight, 1e-6)) < 1e-5
    expected = functional.silu(x.double()) * x.flip(1)
    assert torch.allclose(product(x, x.flip(1)).double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.usefixtures("each_level")
def test_values_that_are_not_finite_stay_where_they_are():
    x = torch.randn(3, 19)
    x[1, 17], weight = torch.nan, torch.ones(19)
    assert norm(x, weight, 1e-6).isnan().all(1).tolist() == [False, True, False]
    assert torch.equal(product(x, torch.ones(3, 19)).isnan(), x.isnan())
    ends = torch.tensor([-torch.inf, -100.0, torch.inf])
    assert product(ends, torch.ones(3)).tolist() == [0.0, 0.0, torch.inf]


def test_any_strides_and_no_values():
    x, weight = torch.randn(5, 7, 6).transpose(0, 2), torch.randn(5)
    assert error(norm(x, weight, 1e-6), expected_norm(x, weight, 1e-6)) < 1e-5
    assert torch.allclose(product(x, x.clone()), functional.silu(x) * x)
    for shape in ((0, 4), (3, 0), (0,)):
        empty = torch.empty(shape)
        assert norm(empty, torch.empty(shape[-1]), 1e-6).shape == shape
        assert product(empty, empty).shape == shape


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 6)
    with pytest.raises(ValueError, match=r"weight is of shape \(5,\) .*: it must hold 6 values"):
        norm(x, torch.ones(5), 1e-6)
    with pytest.raises(ValueError, match=r"float32, not torch\.float64"):
        norm(x.double(), torch.ones(6), 1e-6)
    with pytest.raises(ValueError, match=r"the same shape, got \(2, 6\) and \(6,\)"):
        product(x, x[0])
    with pytest.raises(ValueError, match=r"float32, not torch\.bfloat16"):
        product(x, x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_what_those_of_transformers_do(dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
    )
    torch.manual_seed(0)
    model = transformers.LlamaModel(config).to(dtype).eval()
    nn.init.normal_(model.norm.weight)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        names = [name for name, _ in model.named_parameters()]
        fuse_prompt_layers_(model)
        kinds = {type(module) for module in model.modules()}
        assert {FusedRMSNorm, GatedFeedForward} <= kinds
        assert not {"LlamaRMSNorm", "LlamaMLP"} & {kind.__name__ for kind in kinds}
        assert [name for name, _ in model.named_parameters()] == names
        found = model(tokens).last_hidden_state
    assert found.dtype == dtype
    close = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    assert torch.allclose(found.float(), expected.float(), atol=close * float(expected.abs().max()))
