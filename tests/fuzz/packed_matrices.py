"""Packed sparse matrices: refused, or what the kernels can run."""

import functools
import json

import torch

from fuzz.mutations import NUMBERS, change_bytes
from torchcram.kernels.cpu.library import find, has_int8
from torchcram.runtime.cpu import ops  # noqa: F401  registers the operators
from torchcram.runtime.cpu.packing import (
    Geometry,
    check_packed,
    pack_images,
    pack_int8,
    pack_linear,
)

GEOMETRY = Geometry((3, 3), (2, 1), (1, 1), (1, 1))
SHAPES = ((24, 40), (1, 1), (17, 130), (400, 16), (6, 300))
HEADER = 80  # bytes of ten integers: magic, bytes, rows, inner, layout, blocks, groups, ...


@functools.cache
def bases():
    """Returns packed matrices by what they are for: (kernel, rows, inner, bytes)."""
    generator = torch.Generator().manual_seed(0)

    def sparse(*shape):
        kept = torch.rand(shape, generator=generator) < 0.3
        return torch.randn(shape, generator=generator) * kept

    found = []
    for rows, inner in SHAPES:
        weight = sparse(rows, inner)
        packed = {
            "pairs": pack_linear(weight, layout=2),
            "quad rows": pack_linear(weight, layout=3),
            "int8": pack_int8((weight * 10).to(torch.int8)),
        }
        found += [
            ("int8" if kind == "int8" else "linear", rows, inner, _bytes(matrix))
            for kind, matrix in packed.items()
        ]
    for layout in (2, 3):
        weight = sparse(12, 5, 3, 3)
        found.append(("pixels", 12, 5, _bytes(pack_linear(weight, layout=layout))))
        found.append(("images", 12, 5, _bytes(pack_images(weight, GEOMETRY, layout=layout))))
    return found


def _bytes(packed):
    return packed.numpy().tobytes()


def make(rng):
    if find() is None:
        return b""
    kernel, rows, inner, content = rng.choice(bases())
    content = bytearray(content)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        _change(rng, content)
    if rng.random() < 0.3:
        content = bytearray(change_bytes(rng, bytes(content)))
    if rng.random() < 0.8:
        content[8:16] = len(content).to_bytes(8, "little")  # the size, which is looked at first
    said = {
        "kernel": kernel if rng.random() < 0.95 else rng.choice(("linear", "int8", "pixels")),
        "rows": rows if rng.random() < 0.9 else rng.choice((0, 1, rows + 1, 2 * rows, 100_000)),
        "inner": inner if rng.random() < 0.95 else rng.choice((0, 1, inner + 1, 2 * inner)),
        "batch": rng.choice((0, 1, 3, 16, 17, 70)),
        "twice": rng.random() < 0.3,
    }
    return json.dumps(said).encode() + b"\n" + bytes(content)


def _change(rng, content):
    """Changes a number of the header, of the tables behind it, or of the columns."""
    numbers = [int.from_bytes(content[at : at + 8], "little") for at in range(0, HEADER, 8)]
    columns_at, values_at = numbers[8:10]
    way = rng.randrange(4)
    if way == 0:
        at = 16 + 8 * rng.randrange(8)
        new = rng.choice(
            (*map(int, NUMBERS[:22]), numbers[at // 8] + rng.choice((-1, 1, 16)), 2**40)
        )
        content[at : at + 8] = (new % (1 << 64)).to_bytes(8, "little")
    elif way == 1 and HEADER < columns_at <= len(content):
        at = rng.randrange(HEADER, columns_at) // 8 * 8
        old = int.from_bytes(content[at : at + 8], "little")
        new = rng.choice((0, 1, old + 1, old - 1, old + 256, 65536, 2**62, 2**63 - 1, 2**64 - 1))
        content[at : at + 8] = (new % (1 << 64)).to_bytes(8, "little")
    elif columns_at + 2 <= min(values_at, len(content)):
        at = columns_at + rng.randrange(values_at - columns_at) // 2 * 2
        new = rng.choice((0, 1, 2, 3, 16, 255, 256, 512, 4096, 32768, 65280, 65535))
        content[at : at + 2] = new.to_bytes(2, "little")


def read(content, folder):
    del folder
    if find() is None:
        return False
    said, _, packed = content.partition(b"\n")
    said = json.loads(said)
    packed = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(0)
    try:
        check_packed(packed.to(torch.uint8))
        y = _run(said, packed)
    except ValueError:
        return False
    return y is not None


def _run(said, packed):
    rows, inner, batch = said["rows"], said["inner"], said["batch"]
    op, bias = torch.ops.torchcram, torch.ones(rows)
    if said["kernel"] == "int8":
        if not has_int8():
            return None
        layer = (packed, torch.ones(rows, dtype=torch.int32), torch.ones(rows), bias)
        x = torch.randn(batch, inner)
        if said["twice"]:
            return op.sparse_feed_forward_int8(x, *layer, *layer, None, rows, "gelu")
        return op.sparse_linear_int8(x, *layer, None, rows, "relu")
    if said["kernel"] == "linear":
        x = torch.randn(batch, inner)
        if said["twice"]:
            return op.sparse_feed_forward(x, packed, bias, "gelu", packed, bias, None, rows)
        return op.sparse_linear(x, packed, bias, torch.ones(rows), rows, "silu")
    by_images = said["kernel"] == "images"
    x = torch.randn(batch, inner, 7, 6)
    pairs = (GEOMETRY.kernel, GEOMETRY.stride, GEOMETRY.padding, GEOMETRY.dilation)
    numbers = [number for pair in pairs for number in pair]
    return op.sparse_conv2d(x, packed, bias, None, rows, numbers, by_images, True)
