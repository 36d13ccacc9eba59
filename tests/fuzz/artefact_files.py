"""Compact files: manifest and parts changed, the checksums made right again, or bytes changed."""

import copy
import functools
import hashlib
import json
import math
import zlib
from unittest import mock

import torch
from torch import nn

from fuzz.mutations import NUMBERS, change_bytes, change_data, value
from torchcram import artifact, compress_, parse_operator
from torchcram.artifact.codec import _expected
from torchcram.artifact.format import DTYPES, TensorSpec, parse_encoding
from torchcram.artifact.integers import same_bits

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
"""What safetensors calls the types."""

OTHER_CODES = ("C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F5")
"""Types that compact files do not have, or nobody knows."""


class Model(nn.Module):
    """A model with a tensor for every encoding and every kind of value."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        operators = (
            "global:0.8",
            "nm:2:4",
            "nm:1:5",
            "int4",
            "int3:g32",
            "nm:2:4+int8",
            "global:0",
        )
        for index, operator in enumerate(operators):
            inputs = {2: 160, 4: 64}.get(index, 32)
            layer = nn.Linear(inputs, 6, bias=index % 2 == 0).to(dtype)
            layer.weight.data = torch.randn(layer.weight.shape, generator=generator).to(dtype)
            compress_(layer, operator)
            setattr(self, f"layer{index}", layer)
        self.experts = nn.Parameter(torch.randn(3, 4, 32, generator=generator).to(dtype))
        for expert in self.experts.data:
            parse_operator("nm:2:4+int4").compress_({"": expert})
        self.turned = nn.ConvTranspose2d(8, 4, 3, groups=2).to(dtype)
        compress_(self.turned, "nm:1:4+int5")
        self.tied = self.layer0
        self.zeros = nn.Parameter(torch.zeros(0, 4, dtype=dtype))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))


BASES = tuple(DTYPES[name] for name in ("float32", "bfloat16", "float64"))


@functools.cache
def base(number):
    """Returns a model, and the manifest and parts of its file."""
    import tempfile
    from pathlib import Path

    model = Model(BASES[number])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        artifact.save(model, path, operator="nm:2:4+nm:1:5", metadata={"a": [1, {"b": None}]})
        content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    manifest = json.loads(header.pop("__metadata__")["torchcram"])
    data = content[8 + size :]
    parts = {
        key: [entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]]
        for key, entry in header.items()
    }
    return model, manifest, parts


def make(rng):
    number = rng.randrange(len(BASES))
    _, manifest, parts = copy.deepcopy(base(number))
    way = rng.random()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if way < 0.4:
            _change_entry(rng, manifest, parts)
        elif way < 0.6:
            change_data(rng, manifest)
        elif way < 0.8:
            _change_part(rng, parts)
        else:
            _make_entry(rng, manifest, parts)
    if rng.random() < 0.97:
        _make_right(manifest, parts)
    content = _file(rng, manifest, parts)
    if rng.random() < 0.05:
        content = change_bytes(rng, content)
    return bytes([number]) + content


def _change_entry(rng, manifest, parts):
    """Changes what the manifest says of one tensor, to something that is nearly allowed."""
    names = list(manifest["tensors"])
    encoded = [name for name in names if name not in parts]  # its parts have names of their own
    name = rng.choice(encoded if encoded and rng.random() < 0.8 else names)
    entry = manifest["tensors"][name]
    if not isinstance(entry, dict):
        return
    way = rng.randrange(7)
    if way == 0:
        entry["encoding"] = _encoding(rng)
    elif way == 1:
        entry["dtype"] = rng.choice(list(CODES))
    elif way == 2:
        entry["shape"] = _shape(rng, entry["shape"])
    elif way == 3:
        key = rng.choice(("transposed", "transposed", "stacked"))
        some = (None, True, True, False, 1, 2, 3, 4, 2**63 - 1, 2**63, 2**64)
        entry[key] = rng.choice((*some, rng.choice(NUMBERS)))
    elif way == 4:
        manifest["tied"][rng.choice((name, "new", *names))] = rng.choice((name, "new", *names))
    elif way == 5:
        other = rng.choice(("new", *names))
        manifest["tensors"][other] = entry
        for key in entry_keys(name, entry):
            if key in parts:
                parts[other + key[len(name) :]] = parts[key]
    else:
        entry[rng.choice(list(entry))] = value(rng)


def _encoding(rng):
    places = rng.choice(("dense", "mask", "nm:2:4", "nm:1:5", "nm:1:8", "nm:3:8", "nm:256:256"))
    stored = rng.choice(
        ("", "+int2", "+int3", "+int4", "+int8", "+int4:g8", "+int5:g32", "+float16")
    )
    return places + stored


def _shape(rng, shape):
    shape = list(shape) if isinstance(shape, list) else []
    way = rng.randrange(5)
    if way == 0:
        return shape[::-1]
    if way == 1:
        return [1] * rng.choice((1, 2, 6, 8, 9)) + shape
    if way == 2 and shape:
        shape[rng.randrange(len(shape))] = rng.choice(NUMBERS)
        return shape
    if rng.random() < 0.05:
        return [2**63 - 1] * 200_000  # a product of so many takes minutes
    if way == 3:
        return [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, 2, 4, 8, 9, 5000)))]
    return [rng.choice((0, 1, 2, 4, 8)) for _ in range(rng.choice((0, 1, 2, 3, 4)))]


def _change_part(rng, parts):
    """Changes one stored part: its bytes, its type, its shape, its name."""
    if not parts:
        return
    key = rng.choice(list(parts))
    if "flags" in parts and rng.random() < 0.1:
        key = "flags"  # of which not every byte is allowed
    _, shape, data = parts[key]
    way = rng.randrange(6)
    if way <= 2:
        changed = change_bytes(rng, data)
        parts[key][2] = (changed + bytes(len(data)))[: len(data)] if way else changed
        if not way:
            parts[key][0], parts[key][1] = "U8", [len(changed)]
    elif way == 3:
        parts[key][0] = rng.choice((*CODES.values(), *OTHER_CODES))
    elif way == 4:
        parts[key][1] = rng.choice(([1, *shape], [*shape, 1], shape[::-1], [len(data)], []))
    else:
        parts[rng.choice((*parts, "new", f"{key}:mask", ""))] = parts.pop(key)


def _make_entry(rng, manifest, parts):
    """Makes a tensor of the right sizes with anything in it, so that it gets as far as possible."""
    name = rng.choice((*manifest["tensors"], "new"))
    text = rng.choice(("float32", "float32", "float16", "bfloat16", "float64", *CODES))
    shape = [rng.choice((1, 2, 3, 4, 8, 16, 40, 256)) for _ in range(rng.choice((1, 2, 2, 3, 4)))]
    if math.prod(shape) > 1 << 14:
        shape = shape[:1]
    groups = rng.choice((None, None, None, 1, 2, 4))
    encoding = parse_encoding(_encoding(rng))
    used_as = {} if groups is None else {"transposed": groups}
    if rng.random() < 0.3:
        used_as["stacked"] = True
    spec = TensorSpec(dtype=DTYPES[text], shape=tuple(shape), encoding=encoding, **used_as)
    entry = {"dtype": text, "shape": shape, "encoding": str(encoding), "crc32": 0, "sha256": ""}
    try:
        expected = _expected(spec)
    except (ValueError, RuntimeError):  # such a tensor cannot be stored in this way
        expected = {}
    for key in [key for key in parts if key == name or key.startswith(f"{name}:")]:
        del parts[key]
    for part, (dtype, size) in expected.items():
        size = rng.randrange(spec.numel + 1) if size is None else size
        data = _content(rng, part, size * dtype.itemsize)
        key = encoding.keys(name)[part]
        parts[key] = [CODES[str(dtype).removeprefix("torch.")], [size], data]
    manifest["tensors"][name] = {**entry, **used_as}


def _content(rng, part, size):
    """Returns bytes for a part; those of places that ascend and of masks are not random."""
    way = rng.randrange(4)
    if way == 0:
        return bytes(size)
    if way == 1:
        return b"\xff" * size
    if way == 2 and part == "indices":
        return b"\x44" * size  # 0, 1, 0, 1 of two bits
    return rng.randbytes(size)


def entry_keys(name, entry):
    """Returns what the parts of a tensor are called, as far as the entry can be read."""
    try:
        return sorted(parse_encoding(entry["encoding"]).keys(name).values())
    except (ValueError, TypeError, KeyError):
        return [name]


def _make_right(manifest, parts):
    entries = manifest.get("tensors")
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, dict):
            seen = b"".join(parts[key][2] for key in entry_keys(name, entry) if key in parts)
            entry["crc32"], entry["sha256"] = zlib.crc32(seen), hashlib.sha256(seen).hexdigest()


def _file(rng, manifest, parts):
    text = json.dumps(manifest)
    if rng.random() < 0.02:
        depth = rng.choice((100, 500, 950, 1100, 20_000))
        text = text.replace('"nm:2:4+nm:1:5"', "[" * depth + "]" * depth, 1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    header = {"__metadata__": {"torchcram": text, "torchcram.sha256": digest}}
    data = b""
    for key, (code, shape, content) in parts.items():
        header[key] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data


def read(content, folder):
    path = folder / "model.safetensors"
    path.write_bytes(content[1:])
    found = _loaded(path)
    with mock.patch("torchcram.kernels.cpu.decode.find", return_value=None):
        _same(found, _loaded(path), "with and without compiled code")
    model = copy.deepcopy(base(content[0] % len(BASES))[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        artifact.load(path, model)
    except ValueError as error:
        require_named(path, error)
        _same(before, model.state_dict(), "after a refused file")
    else:
        assert found is not None, "a model took what cannot be loaded"
        taken = {name: found[name].to(tensor.dtype) for name, tensor in before.items()}
        _same(taken, model.state_dict(), "loaded into a model")
    if found is None:
        return False
    _same(found, {name: found[name] for name, _ in artifact.stream(path)}, "streamed")
    _verified(path)
    for name, entry in artifact.read_manifest(path).tensors.items():
        assert (found[name].dtype, tuple(found[name].shape)) == (entry.dtype, entry.shape), name
        expected = _decoded_slowly(name, entry, content[1:])
        if expected is not None:
            raw = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == expected, f"{name!r} is not what is stored"
    _save_again(found, folder)
    return True


def _decoded_slowly(name, entry, content):
    """Returns the bytes of a tensor that is stored dense or with a mask, in its own type."""
    encoding = entry.encoding
    if encoding.bits or encoding.values or isinstance(encoding.places, tuple):
        return None
    size = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:size]), content[size:]
    parts = {part: header[key]["data_offsets"] for part, key in encoding.keys(name).items()}
    parts = {part: data[slice(*offsets)] for part, offsets in parts.items()}
    if "mask" not in parts:
        return parts["values"]
    step = entry.dtype.itemsize
    values = iter(range(0, len(parts["values"]), step))
    expected = b""
    for place in range(entry.numel):
        kept = parts["mask"][place // 8] >> place % 8 & 1
        start = next(values) if kept else 0
        expected += parts["values"][start : start + step] if kept else bytes(step)
    return expected


def _loaded(path):
    """Returns the state dict in a file, None where it is refused."""
    try:
        return artifact.load(path)
    except ValueError as error:
        require_named(path, error)
        return None


def require_named(path, error):
    assert str(path) in str(error), f"the error does not name the file: {error}"


def _verified(path):
    """Compares the long checksums, too, which may be others."""
    try:
        artifact.verify(path)
    except ValueError as error:
        require_named(path, error)
        if "checksum" not in str(error):
            raise


def _save_again(found, folder):
    artifact.save(found, folder / "again")
    _same(found, artifact.load(folder / "again"), "saved again")
    assert not list(folder.glob(".again*")), "something is left beside the file"


def _same(one, other, when):
    """Raises AssertionError where two state dicts are not the same, bit for bit."""
    assert (one is None) == (other is None), f"refused only once, {when}"
    if one is None:
        return
    assert one.keys() == other.keys(), f"other names {when}"
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, f"{name!r} is of another type {when}"
        assert bool(same_bits(tensor, other[name]).all()), f"{name!r} has other values {when}"
