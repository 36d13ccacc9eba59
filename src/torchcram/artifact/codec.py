"""Encodes tensors into the parts that a file stores, and decodes them again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchcram.artifact.format import MASK, TensorSpec
from torchcram.artifact.integers import (
    CHUNK,
    Quantized,
    as_integers,
    pack,
    packed_size,
    read_integers,
)
from torchcram.artifact.sparse_layout import (
    Values,
    count_kept,
    fill_up,
    index_width,
    mask_of_indices,
    place_by_indices_,
    place_by_mask_,
    require_end,
    require_indices,
    write_indices,
    write_mask,
)
from torchcram.kernels.cpu.decode import decode_


def encode(
    tensor: Tensor, spec: TensorSpec, quantized: Quantized | None = None
) -> dict[str, Tensor]:
    """Returns the parts that `decode` turns back into the tensor.

    Args:
        tensor: Tensor to store, contiguous and on the CPU.
        spec: Specification of the tensor, with its encoding.
        quantized: Integers and scales, for an encoding with bits.
    """
    encoding = spec.encoding
    flat = (spec.to_rows(tensor) if encoding.by_rows else tensor).reshape(-1)
    stored: dict[str, Tensor] = {}
    kept = None
    if encoding.places is not None:
        kept = as_integers(flat) != 0  # -0.0 is not stored as a zero
        if encoding.places == MASK:
            stored["mask"] = write_mask(kept)
        else:
            kept = fill_up(kept, *encoding.pattern)
            stored["indices"] = write_indices(kept, encoding.pattern[1])
    if encoding.bits is None or quantized is None:
        values = tensor if kept is None else flat[kept]
        return {**stored, "values": values.to(encoding.values or tensor.dtype)}
    codes = quantized.codes
    if not encoding.by_rows:
        codes = spec.from_rows(codes).view(-1)
    codes = codes if kept is None else codes[kept]
    codes = codes.view(torch.uint8).bitwise_and((1 << encoding.bits) - 1)
    return {**stored, "integers": pack(codes, encoding.bits), "scales": quantized.scales}


def decode(parts: Mapping[str, Tensor], spec: TensorSpec, out: Tensor | None = None) -> Tensor:
    """Returns the tensor that parts encode.

    Args:
        parts: Parts by name.
        spec: Specification of the tensor.
        out: Tensor of the same shape to write to; by default new memory. It stays unchanged if the
            parts are invalid.

    Raises:
        ValueError: If the parts are not those of such a tensor.
    """
    require_decodable(parts, spec)
    flat = _memory_of(out, spec)
    if flat is None:
        flat = torch.empty(spec.numel, dtype=spec.computed_in)
        tensor = _decoded(flat, parts, spec)
        return tensor if out is None else out.copy_(tensor)
    _decoded(flat, parts, spec)
    assert out is not None  # noqa: S101
    if not out.is_inference():  # autograd does not see what compiled code writes
        torch.autograd.graph.increment_version(out)
    return out


def _memory_of(out: Tensor | None, spec: TensorSpec) -> Tensor | None:
    """Returns the memory of `out` if values can be written to it directly."""
    if out is None or out.device.type != "cpu" or not out.dtype == spec.dtype == spec.computed_in:
        return None
    return out.view(-1) if spec.in_order and out.is_contiguous() else None


def _decoded(flat: Tensor, parts: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    """Fills `flat` with the values; returns them in shape and type of the tensor."""
    if not _fill_at_once_(flat, parts, spec):
        return _scaled(_fill_(flat, parts, spec), parts, spec)
    tensor = spec.from_rows(flat) if spec.encoding.by_rows else flat.view(spec.shape)
    return tensor.to(spec.dtype)


def _fill_at_once_(flat: Tensor, parts: Mapping[str, Tensor], spec: TensorSpec) -> bool:
    """Fills `flat` with stored values times their scales, by compiled code.

    Returns:
        Whether it was done; False without compiled code, or if it does not support such a tensor.
    """
    encoding = spec.encoding
    bits, scales = encoding.bits or 0, parts.get("scales")
    values = parts["integers" if bits else "values"].view(-1)
    if not spec.numel:
        return False
    # outputs with a scale each are not contiguous
    scattered = bits and spec.transposed is not None and not encoding.by_rows
    if scattered or flat.dtype != torch.float32 or not (bits or values.dtype == torch.float32):
        return False
    stored = _count_stored(parts, spec) if bits else len(values)
    if bits:
        _require("integers", values, torch.uint8, packed_size(stored, bits))
    mask = parts.get("mask")
    if mask is not None:
        require_end(mask, spec.numel)
    elif encoding.places is not None:
        mask = mask_of_indices(parts["indices"], pattern=encoding.pattern)
        if mask is None:
            return False
    used = decode_(flat, mask, values, stored=stored, bits=bits, scales=scales)
    if used is None:
        return False
    if used < 0:
        raise ValueError(f"it has only {stored} values for its places")
    if used != stored:
        raise ValueError(f"it has {stored} values for {used} places")
    return True


def _fill_(flat: Tensor, parts: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    """Fills `flat` with stored values; integers are not multiplied by their scales yet."""
    encoding = spec.encoding
    values = _values(parts, spec)
    if encoding.places is None:
        for start in range(0, len(flat), CHUNK):
            places = slice(start, min(start + CHUNK, len(flat)))
            flat[places] = values.read(places)
        return flat
    if encoding.places == MASK:
        return place_by_mask_(flat, parts["mask"], values)
    return place_by_indices_(flat, parts["indices"], values, pattern=encoding.pattern)


def _scaled(flat: Tensor, parts: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    """Multiplies by the scales, if any, and returns the values in the shape of the tensor."""
    if spec.encoding.bits is None:
        return spec.from_rows(flat) if spec.encoding.by_rows else flat.view(spec.shape)
    scales = parts["scales"]
    if spec.encoding.by_rows:
        flat.view(len(scales), -1).mul_(scales.unsqueeze(1))
        return spec.from_rows(flat).to(spec.dtype)
    rows = spec.to_rows(flat.view(spec.shape))  # (groups, outputs, *kernel positions, inputs)
    rows.mul_(scales.view(*rows.shape[:2], *[1] * (rows.dim() - 2)))
    return flat.view(spec.shape).to(spec.dtype)


def _values(parts: Mapping[str, Tensor], spec: TensorSpec) -> Values:
    """Returns the stored values, which are read some at a time."""
    bits, dtype = spec.encoding.bits, spec.computed_in
    if bits is None:
        flat = parts["values"].view(-1)
        return Values(len(flat), lambda places: flat[places].to(dtype))
    stored, packed = _count_stored(parts, spec), parts["integers"]
    _require("integers", packed, torch.uint8, packed_size(stored, bits))
    return Values(stored, lambda places: read_integers(packed, bits, places, dtype=dtype))


def _count_stored(parts: Mapping[str, Tensor], spec: TensorSpec) -> int:
    """Returns the number of stored values."""
    if spec.encoding.places is None:
        return spec.numel
    if spec.encoding.places == MASK:
        return count_kept(parts["mask"], spec.numel)
    keep, group = spec.encoding.pattern
    return spec.numel // group * keep


def require_parts(parts: Mapping[str, Tensor], spec: TensorSpec) -> None:
    """Raises ValueError unless the parts have the types and sizes of such a tensor."""
    for name, (kind, size) in _expected(spec).items():
        _require(name, parts[name], kind, size)


def require_decodable(parts: Mapping[str, Tensor], spec: TensorSpec) -> None:
    """Raises ValueError for parts that cannot be decoded.

    Parts that pass are decoded without an error, so that a model may be written to once all its
    parts have passed.
    """
    require_parts(parts, spec)
    bits, places = spec.encoding.bits, spec.encoding.places
    if places == MASK:
        kept = count_kept(parts["mask"], spec.numel)
        if bits is not None:
            _require("integers", parts["integers"], torch.uint8, packed_size(kept, bits))
        elif (stored := parts["values"].numel()) != kept:
            only = "only " if stored < kept else ""
            raise ValueError(f"it has {only}{stored} values for {kept} places")
    elif places is not None:
        require_indices(parts["indices"], spec.numel, pattern=spec.encoding.pattern)
    values = parts.get("values")
    if values is not None and values.dtype == torch.bool and _has_other_bytes(values):
        raise ValueError("its booleans have other bytes than 0 and 1")


def _has_other_bytes(values: Tensor) -> bool:
    """Returns whether booleans hold bytes other than 0 and 1, which torch never writes."""
    return bool((values.view(torch.uint8) > 1).any())


def _expected(spec: TensorSpec) -> dict[str, tuple[torch.dtype, int | None]]:
    """Returns type and size of every part; a size is None if it depends on the mask."""
    expected: dict[str, tuple[torch.dtype, int | None]] = {}
    encoding, numel = spec.encoding, spec.numel
    stored: int | None = numel
    if encoding.places == MASK:
        stored, expected["mask"] = None, (torch.uint8, packed_size(numel, 1))
    elif encoding.places is not None:
        keep, group = encoding.pattern
        _require_groups(spec, group)
        stored = numel // group * keep
        expected["indices"] = torch.uint8, packed_size(stored, index_width(group))
    if encoding.bits is None:
        return {**expected, "values": (encoding.values or spec.dtype, stored)}
    groups, outputs = spec.rows[:2]
    scales = groups * outputs
    if encoding.group_size is not None:
        _require_groups(spec, encoding.group_size)
        scales = numel // encoding.group_size
    size = None if stored is None else packed_size(stored, encoding.bits)
    return {**expected, "integers": (torch.uint8, size), "scales": (spec.computed_in, scales)}


def _require_groups(spec: TensorSpec, group: int) -> None:
    if spec.rows[-1] % group:
        raise ValueError(f"it has {spec.rows[-1]} inputs, no multiple of {group}")


def _require(name: str, part: Tensor, dtype: torch.dtype, size: int | None) -> None:
    """Raises ValueError unless a part has this type and size."""
    if part.dtype != dtype or (size is not None and part.numel() != size):
        expected = "any" if size is None else size
        raise ValueError(
            f"its {name} are {part.numel()} of {part.dtype}, not {expected} of {dtype}"
        )
    if name != "values" and part.dim() != 1:
        raise ValueError(f"its {name} have the shape {tuple(part.shape)}, not one dimension")
