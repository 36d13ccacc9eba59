"""Values back to the places that a mask keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_kernels

from torchcram.kernels.cpu import library
from torchcram.kernels.cpu.decode import expand_

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]

pytestmark = needs_kernels


def bits_of(kept):
    filled = torch.cat((kept, kept.new_zeros(-len(kept) % 8))).view(-1, 8)
    return (filled.int() << torch.arange(8)).sum(1).to(torch.uint8)


def values_for(count, dtype):
    return torch.arange(1, count + 1).to(dtype)


@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 200))
def test_values_go_to_their_places(data, dtype, count):
    kept = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool
    )
    values = values_for(int(kept.sum()), dtype)
    out = torch.full((count,), 7).to(dtype)
    assert expand_(out, bits_of(kept), values)
    expected = torch.zeros(count, dtype=dtype)
    expected[kept] = values
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("count", [5, 16, 131])
def test_values_are_as_many_as_places(dtype, wrong, count):
    values = values_for(count + wrong, dtype)
    with pytest.raises(ValueError, match="does not keep as many positions"):
        expand_(torch.zeros(count, dtype=dtype), bits_of(torch.ones(count).bool()), values)


def test_what_does_not_belong_together_is_refused():
    bits, values = torch.tensor([255], dtype=torch.uint8), torch.ones(8)
    for out in (torch.zeros(9), torch.zeros(8, dtype=torch.float64), torch.zeros(8, 2)[:, 0]):
        with pytest.raises(ValueError, match="do not match in size"):
            expand_(out, bits, values)


def test_without_the_library_nothing_is_done(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    library.find.cache_clear()
    try:
        out = torch.ones(8)
        assert not expand_(out, torch.tensor([0], dtype=torch.uint8), out[:0])
        assert torch.equal(out, torch.ones(8))
    finally:
        library.find.cache_clear()
