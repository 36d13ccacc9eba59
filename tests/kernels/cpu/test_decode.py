"""Stored values back to a tensor, and checksums, by compiled code."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_kernels
from test_expand import bits_of

from torchcram.artifact.integers import pack, packed_size, read_integers
from torchcram.kernels.cpu import library
from torchcram.kernels.cpu.decode import checksum, count_ones, decode_, rows_of_table

pytestmark = needs_kernels
COUNTS = st.sampled_from([0, 1, 7, 8, 63, 64, 65, 200, 2047, 2048, 2049, 5000])


@given(st.integers(0, 999), st.sampled_from([0, 1, 15, 16, 63, 64, 65, 79, 80, 128, 1000, 70000]))
def test_checksums_are_those_of_zlib(seed, count):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count + 3,), generator=generator, dtype=torch.uint8)[3:]
    assert checksum(data) == zlib.crc32(data.numpy().tobytes())
    half = count // 2  # in two parts
    assert checksum(data[half:], checksum(data[:half])) == checksum(data)


def test_checksums_of_known_bytes():
    assert checksum(torch.tensor(list(b"123456789"), dtype=torch.uint8)) == 0xCBF43926
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == 0
    with pytest.raises(ValueError, match=r"of bytes, not of torch\.int8"):
        checksum(torch.zeros(3, dtype=torch.int8))


@given(st.integers(0, 99), COUNTS, st.floats(0, 1))
def test_ones_are_counted(seed, count, share):
    kept = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share
    assert count_ones(bits_of(kept), count) == int(kept.sum())
    assert count_ones(bits_of(torch.cat((kept, kept.new_ones(9)))), count) == int(kept.sum())


@given(st.integers(0, 99), COUNTS, st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]), st.booleans())
def test_floats_go_to_their_places(seed, count, share, scaled):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(count, generator=generator) < (1.0 if share is None else share)
    values = torch.randn(int(kept.sum()), generator=generator)
    scales = torch.rand(5 if count % 5 == 0 else 1, generator=generator) + 0.5 if scaled else None
    mask = None if share is None else bits_of(kept)
    out = torch.full((count,), 7.0)
    assert decode_(out, mask, values, stored=len(values), bits=0, scales=scales) == len(values)
    expected = torch.zeros(count)
    expected[kept] = values
    if scales is not None and count:
        expected = (expected.view(len(scales), -1) * scales.unsqueeze(1)).flatten()
    assert torch.equal(out, expected)


@given(st.integers(0, 99), COUNTS, st.integers(2, 8), st.sampled_from([None, 0.1, 0.9]))
def test_integers_go_to_their_places(seed, count, bits, share):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(count, generator=generator) < (1.0 if share is None else share)
    stored = int(kept.sum())
    codes = torch.randint(0, 1 << bits, (stored,), generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert len(packed) == packed_size(stored, bits)
    out = torch.full((count,), 7.0)
    mask = None if share is None else bits_of(kept)
    assert decode_(out, mask, packed, stored=stored, bits=bits, scales=None) == stored
    expected = torch.zeros(count)
    if stored:
        expected[kept] = read_integers(packed, bits, slice(0, stored))
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))  # -0.0 too


@pytest.mark.parametrize("count", [5, 64, 3000])
def test_too_few_values_are_noticed(count):
    mask = bits_of(torch.ones(count).bool())
    given = {"bits": 0, "scales": None}
    out = torch.zeros(count)
    assert decode_(out, mask, torch.ones(count - 1), stored=count - 1, **given) == -1
    assert decode_(out, None, torch.ones(count - 1), stored=count - 1, **given) == -1
    assert decode_(out, mask, torch.ones(count + 1), stored=count + 1, **given) == count


@pytest.mark.parametrize(
    "wrong",
    [
        {"out": torch.zeros(9)},
        {"out": torch.zeros(8).double()},
        {"out": torch.zeros(8, 2)[:, 0]},
        {"values": torch.ones(3)},
        {"values": torch.ones(8).double()},
        {"values": torch.ones(8, dtype=torch.uint8)},
        {"bits": 1},
        {"bits": 9},
        {"scales": torch.ones(3)},
        {"scales": torch.ones(0)},
        {"mask": torch.zeros(1)},
    ],
)
def test_what_does_not_belong_together_is_refused(wrong):
    mask = torch.tensor([255], dtype=torch.uint8)
    given = {"out": torch.zeros(8), "mask": mask, "values": torch.ones(8), "bits": 0}
    with pytest.raises(ValueError, match="do not match in size"):
        decode_(**{**given, "stored": 8, "scales": None, **wrong})


def test_rows_of_a_table():
    table = torch.arange(512, dtype=torch.int16).view(256, 2)
    numbers = torch.tensor([3, 0, 255, 3], dtype=torch.uint8)
    found = rows_of_table(table, numbers)
    assert found.view(torch.int16).tolist() == [6, 7, 0, 1, 510, 511, 6, 7]
    assert rows_of_table(table[:, :0], numbers).tolist() == []
    for bad in (table[:200], table):
        with pytest.raises(ValueError, match="256 rows"):
            rows_of_table(bad, numbers if bad is not table else numbers.int())


def test_without_the_library_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    library.find.cache_clear()
    data = torch.tensor([1, 2, 3], dtype=torch.uint8)
    try:
        assert checksum(data, 5) == zlib.crc32(bytes([1, 2, 3]), 5)
        assert count_ones(data, 8) is None
        assert rows_of_table(torch.zeros(256, 1), data) is None
        out = torch.zeros(3)
        assert decode_(out, None, torch.ones(3), stored=3, bits=0, scales=None) is None
        assert not out.any()
    finally:
        library.find.cache_clear()
