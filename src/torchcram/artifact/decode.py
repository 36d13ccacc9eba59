"""The stored parts of a tensor back to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchcram.artifact.bits import CHUNK, packed_size
from torchcram.artifact.encoding import MASK, index_width
from torchcram.artifact.form import Form
from torchcram.artifact.integers import read_integers
from torchcram.artifact.places import (
    Values,
    count_kept,
    mask_of_indices,
    place_by_indices_,
    place_by_mask_,
    require_end,
    require_indices,
)
from torchcram.kernels.cpu.expand import decode_


def decode(parts: Mapping[str, Tensor], form: Form, out: Tensor | None = None) -> Tensor:
    """Returns the tensor that parts stand for.

    Args:
        parts: Parts by name.
        form: Form of the tensor.
        out: Tensor of the same shape to write to; without one it gets memory of its own. It is not
            touched where the parts are refused.

    Raises:
        ValueError: if the parts are not those of such a tensor.
    """
    require_decodable(parts, form)
    flat = _memory_of(out, form)
    if flat is None:
        flat = torch.empty(form.numel, dtype=form.computed_in)
        tensor = _decoded(flat, parts, form)
        return tensor if out is None else out.copy_(tensor)
    _decoded(flat, parts, form)
    assert out is not None  # noqa: S101
    if not out.is_inference():  # compiled code writes unseen; autograd is to know of it
        torch.autograd.graph.increment_version(out)
    return out


def _memory_of(out: Tensor | None, form: Form) -> Tensor | None:
    """Returns the memory of `out` where values can be put without detours."""
    if out is None or out.device.type != "cpu" or not out.dtype == form.dtype == form.computed_in:
        return None
    return out.view(-1) if form.in_order and out.is_contiguous() else None


def _decoded(flat: Tensor, parts: Mapping[str, Tensor], form: Form) -> Tensor:
    """Fills memory with the values; returns them as the tensor they are."""
    if not _fill_at_once_(flat, parts, form):
        return _scaled(_fill_(flat, parts, form), parts, form)
    tensor = form.from_rows(flat) if form.encoding.by_rows else flat.view(form.shape)
    return tensor.to(form.dtype)


def _fill_at_once_(flat: Tensor, parts: Mapping[str, Tensor], form: Form) -> bool:
    """Puts the stored values to their places, times their scales, by compiled code.

    Returns:
        False, with nothing done, where there is none or it is not for such a tensor.
    """
    encoding = form.encoding
    bits, scales = encoding.bits or 0, parts.get("scales")
    values = parts["integers" if bits else "values"].view(-1)
    if not form.numel:
        return False
    apart = bits and form.transposed is not None and not encoding.by_rows  # outputs are not rows
    if apart or flat.dtype != torch.float32 or not (bits or values.dtype == torch.float32):
        return False
    stored = _count_stored(parts, form) if bits else len(values)
    if bits:
        _require("integers", values, torch.uint8, packed_size(stored, bits))
    mask = parts.get("mask")
    if mask is not None:
        require_end(mask, form.numel)
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


def _fill_(flat: Tensor, parts: Mapping[str, Tensor], form: Form) -> Tensor:
    """Puts the stored values to their places; integers are as yet without their scale."""
    encoding = form.encoding
    values = _values(parts, form)
    if encoding.places is None:
        for start in range(0, len(flat), CHUNK):
            places = slice(start, min(start + CHUNK, len(flat)))
            flat[places] = values.read(places)
        return flat
    if encoding.places == MASK:
        return place_by_mask_(flat, parts["mask"], values)
    return place_by_indices_(flat, parts["indices"], values, pattern=encoding.pattern)


def _scaled(flat: Tensor, parts: Mapping[str, Tensor], form: Form) -> Tensor:
    """Multiplies by the scales and brings everything to its shape."""
    if form.encoding.bits is None:
        return form.from_rows(flat) if form.encoding.by_rows else flat.view(form.shape)
    scales = parts["scales"]
    if form.encoding.by_rows:
        flat.view(len(scales), -1).mul_(scales.unsqueeze(1))
        return form.from_rows(flat).to(form.dtype)
    rows = form.to_rows(flat.view(form.shape))  # (groups, outputs, *kernel positions, inputs)
    rows.mul_(scales.view(*rows.shape[:2], *[1] * (rows.dim() - 2)))
    return flat.view(form.shape).to(form.dtype)


def _values(parts: Mapping[str, Tensor], form: Form) -> Values:
    bits, dtype = form.encoding.bits, form.computed_in
    if bits is None:
        flat = parts["values"].view(-1)
        return Values(len(flat), lambda places: flat[places].to(dtype))
    stored, packed = _count_stored(parts, form), parts["integers"]
    _require("integers", packed, torch.uint8, packed_size(stored, bits))
    return Values(stored, lambda places: read_integers(packed, bits, places, dtype=dtype))


def _count_stored(parts: Mapping[str, Tensor], form: Form) -> int:
    """Returns how many values are stored."""
    if form.encoding.places is None:
        return form.numel
    if form.encoding.places == MASK:
        return count_kept(parts["mask"], form.numel)
    keep, group = form.encoding.pattern
    return form.numel // group * keep


def require_parts(parts: Mapping[str, Tensor], form: Form) -> None:
    """Raises ValueError for parts of other types and sizes than a tensor of this form has."""
    for name, (kind, size) in _expected(form).items():
        _require(name, parts[name], kind, size)


def require_decodable(parts: Mapping[str, Tensor], form: Form) -> None:
    """Raises ValueError for parts that are not those of a tensor, whatever the reason.

    Parts that pass are decoded without an error, so that a model of which all parts have passed can
    be written to.
    """
    require_parts(parts, form)
    bits, places = form.encoding.bits, form.encoding.places
    if places == MASK:
        kept = count_kept(parts["mask"], form.numel)
        if bits is not None:
            _require("integers", parts["integers"], torch.uint8, packed_size(kept, bits))
        elif (stored := parts["values"].numel()) != kept:
            only = "only " if stored < kept else ""
            raise ValueError(f"it has {only}{stored} values for {kept} places")
    elif places is not None:
        require_indices(parts["indices"], form.numel, pattern=form.encoding.pattern)
    values = parts.get("values")
    if values is not None and values.dtype == torch.bool and _has_other_bytes(values):
        raise ValueError("its booleans have other bytes than 0 and 1")


def _has_other_bytes(values: Tensor) -> bool:
    """Returns whether booleans hold bytes that torch neither writes nor expects."""
    return bool((values.view(torch.uint8) > 1).any())


def _expected(form: Form) -> dict[str, tuple[torch.dtype, int | None]]:
    """Returns type and size of every part; None where only the mask tells it."""
    expected: dict[str, tuple[torch.dtype, int | None]] = {}
    encoding, numel = form.encoding, form.numel
    stored: int | None = numel
    if encoding.places == MASK:
        stored, expected["mask"] = None, (torch.uint8, packed_size(numel, 1))
    elif encoding.places is not None:
        keep, group = encoding.pattern
        _require_groups(form, group)
        stored = numel // group * keep
        expected["indices"] = torch.uint8, packed_size(stored, index_width(group))
    if encoding.bits is None:
        return {**expected, "values": (encoding.values or form.dtype, stored)}
    groups, outputs = form.rows[:2]
    scales = groups * outputs
    if encoding.group_size is not None:
        _require_groups(form, encoding.group_size)
        scales = numel // encoding.group_size
    size = None if stored is None else packed_size(stored, encoding.bits)
    return {**expected, "integers": (torch.uint8, size), "scales": (form.computed_in, scales)}


def _require_groups(form: Form, group: int) -> None:
    if form.rows[-1] % group:
        raise ValueError(f"it has {form.rows[-1]} inputs, no multiple of {group}")


def _require(name: str, part: Tensor, dtype: torch.dtype, size: int | None) -> None:
    if part.dtype != dtype or (size is not None and part.numel() != size):
        wanted = "any" if size is None else size
        raise ValueError(f"its {name} are {part.numel()} of {part.dtype}, not {wanted} of {dtype}")
    if name != "values" and part.dim() != 1:
        raise ValueError(f"its {name} have the shape {tuple(part.shape)}, not one dimension")
