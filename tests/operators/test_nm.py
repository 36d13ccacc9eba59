import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchcram import NM, compressible_weights

LAYERS = {
    "first conv": (lambda: nn.Conv2d(3, 8, 7), False),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), False),
    "grouped": (lambda: nn.Conv2d(16, 8, 3, groups=2), True),
    "conv": (lambda: nn.Conv2d(8, 6, 3), True),
    "channels last": (lambda: nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last), True),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 3), True),
    "grouped transposed": (lambda: nn.ConvTranspose2d(8, 6, 3, groups=2), True),
    "depthwise transposed": (lambda: nn.ConvTranspose2d(8, 8, 3, groups=8), False),
    "odd transposed": (lambda: nn.ConvTranspose2d(6, 8, 3), False),
    "conv1d": (lambda: nn.Conv1d(4, 3, 5), True),
    "linear": (lambda: nn.Linear(12, 5), True),
    "odd linear": (lambda: nn.Linear(13, 8), False),
}


def kept_per_group(weight, transposed, group):
    """Counts nonzeros along the input dimension, group by group."""
    rows = weight.transpose(0, 1) if transposed else weight
    rows = rows.reshape(rows.shape[0], rows.shape[1], -1)  # groups of channels do not cross 4
    counts = [part.ne(0).sum(1) for part in rows.split(group, dim=1)]
    return set(torch.stack(counts).flatten().tolist())


@pytest.mark.parametrize("name", LAYERS)
def test_the_pattern_holds_along_the_reduction_dimension(name):
    build, fits = LAYERS[name]
    layer = nn.ModuleDict({name.replace(" ", "_"): build()})
    weights = compressible_weights(layer)
    (key,) = weights
    before = weights[key].detach().clone()
    if not fits:
        with pytest.warns(UserWarning, match=f"nm:2:4 leaves dense.*{key}"):
            masks = NM(2, 4).compress_(weights)
        assert masks[key].all()
        assert torch.equal(weights[key], before)
        return
    masks = NM(2, 4).compress_(weights)
    assert kept_per_group(weights[key], "transposed" in name, 4) == {2}
    assert torch.equal(weights[key], before.masked_fill(~masks[key], 0))
    assert masks[key].stride() == weights[key].stride()


def test_layers_left_dense_are_named_once():
    weights = {"only here": torch.randn(4, 5)}
    with pytest.warns(UserWarning, match="only here"):
        NM(1, 4).compress_(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NM(1, 4).compress_(weights)


@settings(deadline=None)
@given(
    st.integers(1, 9), st.data(), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()
)
def test_the_largest_of_every_group_earlier_ones_first(group, data, dtype, tied):
    keep = data.draw(st.integers(1, group))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weight = torch.randn(3, 2 * group, generator=generator)
    weight = (weight * 2).round().to(dtype) if tied else weight.to(dtype)
    mask = NM(keep, group).select({"w": weight})["w"]
    for row, kept in zip(weight.view(-1, group), mask.view(-1, group), strict=True):
        order = sorted(range(group), key=lambda i: (-abs(float(row[i])), i))
        assert [i for i in range(group) if kept[i]] == sorted(order[:keep])


@pytest.mark.parametrize(("keep", "group"), [(5, 4), (0, 4), (-1, 4), (2.0, 4), (1, 0)])
def test_impossible_patterns_are_refused(keep, group):
    with pytest.raises(ValueError, match="NM"):
        NM(keep, group)
