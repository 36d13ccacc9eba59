"""Blocks and the order of rows in GGUF files, written from the description of the format alone."""

import importlib.util
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram import Quantize
from torchcram.integrations import gguf as ours

HALF = 2**-11  # relative error of rounding to float16
BYTES = {"q8_0": 34, "q4_0": 18}


def read_blocks(data, kind):
    """Integers and scales of every block of every row."""
    integers, scales = [], []
    for row in data:
        for start in range(0, len(row), BYTES[kind]):
            block = bytes(row[start : start + BYTES[kind]])
            scales.append(struct.unpack("<e", block[:2])[0])
            if kind == "q8_0":
                integers += struct.unpack("<32b", block[2:])
            else:
                integers += [byte % 16 - 8 for byte in block[2:]]
                integers += [byte // 16 - 8 for byte in block[2:]]
    return torch.tensor(integers).view(len(data), -1), torch.tensor(scales).view(len(data), -1)


@given(heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(0, 3))
def test_pairs_of_rows_that_rotate_together_become_neighbours(heads, half, columns):
    shape = (heads * 2 * half, columns) if columns else (heads * 2 * half,)
    value = torch.arange(heads * 2 * half * max(1, columns)).view(shape)
    stored = ours.to_gguf_order(value, heads)
    for head in range(heads):
        first = head * 2 * half
        for i in range(half):
            assert torch.equal(stored[first + 2 * i], value[first + i])
            assert torch.equal(stored[first + 2 * i + 1], value[first + half + i])
    assert torch.equal(ours.from_gguf_order(stored, heads), value)
    assert torch.equal(ours.to_gguf_order(ours.from_gguf_order(value, heads), heads), value)


@settings(max_examples=40)
@given(
    bits=st.integers(2, 8),
    group_size=st.sampled_from([None, 32, 64]),
    rows=st.integers(1, 3),
    zeros=st.floats(0, 1),
    kind=st.sampled_from(["q8_0", "q4_0"]),
    seed=st.integers(0, 99),
)
def test_integers_stay_and_scales_are_rounded_to_float16(bits, group_size, rows, zeros, kind, seed):
    if bits > 4:
        kind = "q8_0"
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(rows, 128, generator=generator)
    value[torch.rand(value.shape, generator=generator) < zeros] = 0
    quantize = Quantize(bits, group_size)
    quantize.compress_({"w": value})
    groups = value.view(-1, group_size or 128)
    scale = groups.abs().amax(1, keepdim=True) / quantize.levels
    expected = torch.where(scale == 0, 0, groups / scale).round().view_as(value)
    data = ours._encode_integers("w", value, kind, quantize)
    integers, scales = read_blocks(data, kind)
    assert torch.equal(integers, expected.long())
    read = integers * scales.repeat_interleave(32, 1)
    assert ((read - value).abs() <= HALF * value.abs()).all()
    assert torch.equal(read == 0, value == 0)


def test_values_that_the_operator_did_not_make_are_refused():
    with pytest.raises(ValueError, match=r"no scales reproduce the values of w with 4 bits"):
        ours._encode_integers("w", torch.randn(2, 32), "q4_0", Quantize(4))


@pytest.mark.parametrize(
    ("operator", "chosen"),
    [
        (None, "f16"),
        ("uniform:0.5", "f16"),
        ("wanda@nm:2:4", "f16"),
        ("int8", "q8_0"),
        ("int5:g64", "q8_0"),
        ("int4", "q4_0"),
        ("obs@nm:2:4+int4:g96", "q4_0"),
        (Quantize(2, 32), "q4_0"),
    ],
)
def test_the_type_fits_the_operator(operator, chosen):
    assert ours.choose_type(operator) == chosen


def test_types_and_groups_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"int4:g48: groups of 48 do not fit into the blocks of"):
        ours.choose_type("int4:g48")
    assert ours.choose_type("int4:g48", "q8_0") == "q8_0"
    with pytest.raises(ValueError, match=r"GGUF type 'q5_0': allowed are f32, f16, q8_0, q4_0"):
        ours.choose_type("int8", "q5_0")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"need the package gguf: pip install gguf"):
        ours.check_source(torch.nn.Linear(1, 1), "a.gguf")
