import torch
from hypothesis import given
from hypothesis import strategies as st

from torchcram.artifact.integers import CHUNK, pack, packed_size, unpack, unpack_some


@given(st.integers(1, 8), st.integers(0, 200), st.integers(0, 1 << 30))
def test_numbers_come_back_and_take_no_more_than_they_need(width, count, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1 << width, (count,), generator=generator).to(torch.uint8)
    packed = pack(numbers, width)
    assert packed.dtype == torch.uint8
    assert len(packed) == packed_size(count, width) == -(-count * width // 8)
    assert torch.equal(unpack(packed, width, count), numbers)


def test_number_i_takes_the_bits_from_i_times_width_on():
    for width in range(1, 9):
        numbers = torch.randint(1 << width, (37,)).to(torch.uint8)
        whole = sum(int(number) << (place * width) for place, number in enumerate(numbers))
        packed = pack(numbers, width)
        assert bytes(packed.tolist()) == whole.to_bytes(len(packed), "little")


def test_more_than_a_chunk_comes_back():
    for width in (1, 3, 4, 8):
        numbers = torch.randint(1 << width, (2 * CHUNK + 5,)).to(torch.uint8)
        packed = pack(numbers, width)
        assert torch.equal(unpack(packed, width, len(numbers)), numbers)
        assert torch.equal(unpack_some(packed, width, 1008, count=77), numbers[1008:1085])
