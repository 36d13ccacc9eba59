import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchcram import RowTopK, compress_, compressible_weights
from torchcram.selection import count_kept, keep_largest_each


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    sparsity=st.floats(0, 1, exclude_max=True),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    ties=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_row_is_what_the_selection_of_it_alone_keeps(
    rows, columns, sparsity, dtype, ties, seed
):
    scores = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    scores = scores.round() if ties else scores
    keep = count_kept(columns, sparsity)
    expected = torch.stack(keep_largest_each(list(scores), [keep] * rows))
    assert torch.equal(RowTopK(sparsity).select({"w": scores})["w"], expected)


@pytest.mark.parametrize(
    ("layer", "outputs", "fan_in"),
    [
        (nn.Conv2d(8, 6, 3), 6, 72),
        (nn.Conv2d(8, 6, 3, groups=2), 6, 36),
        (nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last), 6, 72),
        (nn.ConvTranspose2d(8, 6, 3), 6, 72),
    ],
    ids=["conv", "grouped", "channels last", "transposed"],
)
def test_the_row_of_a_convolution_is_all_that_an_output_sums(layer, outputs, fan_in):
    masks = compress_(layer, RowTopK(0.75))
    transposed = isinstance(layer, nn.ConvTranspose2d)
    mask = masks["weight"].transpose(0, 1) if transposed else masks["weight"]
    assert mask.flatten(1).sum(1).tolist() == [fan_in - round(0.75 * fan_in)] * outputs
    assert torch.equal(layer.weight != 0, masks["weight"])


def test_it_is_not_the_uniform_pattern():
    weights = compressible_weights(nn.Linear(16, 16))
    from torchcram import UniformTopK

    assert RowTopK(0.5) != UniformTopK(0.5)
    row, uniform = (p.select(weights)["weight"] for p in (RowTopK(0.5), UniformTopK(0.5)))
    assert not torch.equal(row, uniform)


def test_bad_sparsities_are_named():
    with pytest.raises(ValueError, match=r"RowTopK: sparsity must be in"):
        RowTopK(1.5)
