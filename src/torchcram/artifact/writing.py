"""Compact files, written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchcram.artifact.choose import Hints, store
from torchcram.artifact.encoding import DTYPES, Encoding
from torchcram.artifact.form import Form
from torchcram.artifact.manifest import Entry, Manifest
from torchcram.artifact.manifest import digest as digest_of
from torchcram.artifact.reader import CHECKSUM, MANIFEST, crc32, sha256
from torchcram.artifact.tables import find_tables, round_tables
from torchcram.files import let_read, written_aside
from torchcram.layers import PLAIN, Layout, layout_of
from torchcram.operators import Operator, Quantize, as_operator
from torchcram.sharded import is_sharded
from torchcram.version import __version__
from torchcram.weights import layer_weights

if TYPE_CHECKING:
    from typing import Any

VALUES = (torch.float32, torch.float16, torch.bfloat16)
_PRUNER = re.compile(r"\w+@")


@torch.no_grad()
def save(
    path: str | PathLike[str],
    model: nn.Module | Mapping[str, Tensor],
    *,
    operator: Operator | str | None = None,
    values: torch.dtype | None = None,
    embeddings: Quantize | str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Manifest:
    """Writes a compressed model to one compact file, whole or not at all.

    Every compressible weight is stored in the smallest way that gives it back bit for bit; what
    that is, is seen from the weight itself. So are embeddings. Everything else is stored as it is.
    Of a state dict all tensors of floating point with two or more dimensions count as compressible.

    Args:
        path: of the file; by convention it ends in ".safetensors".
        model: compressed already, or its state dict.
        operator: that it was compressed by; kept in the file.
        values: float16 or bfloat16 to round the compressible weights to where they are not
            quantized; None to leave them as they are. Loading then gives the rounded ones.
        embeddings: "int8" or the like to round the tables of embeddings to, with a scale for every
            row; None to leave them as they are. Loading then gives the rounded ones.
        metadata: what else to keep in the file, as JSON has it: recipe, metrics, data set.

    Returns:
        What the file says of itself.

    Raises:
        ValueError: for a tensor that cannot be stored, by name.
    """
    if values is not None and values not in VALUES:
        raise ValueError(f"values={values}: allowed are {', '.join(map(str, VALUES))} and None")
    tensors, tied = _untied(model.state_dict() if isinstance(model, nn.Module) else model)
    layouts = _layouts(model, tensors)
    tables = find_tables(model, tensors)
    if embeddings is not None:
        tables = round_tables(tables, embeddings)
    hints, rounding = Hints.of(_without_pruners(operator)), Hints.of(_without_pruners(embeddings))
    parts: dict[str, Tensor] = {}
    memory: set[int] = set()
    entries = {}
    for name, tensor in tensors.items():
        value = tables.get(name, tensor).detach().cpu().contiguous()
        form = Form(dtype=value.dtype, shape=tuple(value.shape), encoding=Encoding())
        stored = {"values": value}
        if name in layouts or name in tables:
            kept, known = (None, rounding) if name in tables else (values, hints)
            try:
                form, stored = store(value, known, values=kept, used_as=layouts.get(name, PLAIN))
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
        entries[name] = Entry(**vars(form), crc32=crc32(stored), sha256=sha256(stored))
        for part, key in form.encoding.keys(name).items():
            if key in parts or key == "__metadata__":
                raise ValueError(f"{name!r} cannot be stored beside a tensor named {key!r}")
            parts[key] = _alone(stored[part], memory)
    said = None if operator is None else str(operator)
    manifest = Manifest(entries, tied, said, __version__, dict(metadata or {}))
    _write(Path(path), parts, manifest)
    return manifest


def _alone(part: Tensor, memory: set[int]) -> Tensor:
    """Returns a tensor that shares no memory with the others, which safetensors refuses."""
    place = part.untyped_storage().data_ptr()
    if part.numel() and place in memory:
        return part.clone()
    memory.add(place)
    return part


def _without_pruners(operator: Operator | str | None) -> Operator | None:
    """Reads an operator; of "wanda@nm:2:4" only what it leaves, nm:2:4, counts here."""
    if isinstance(operator, str):
        return as_operator(_PRUNER.sub("", operator))
    return operator


def _untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns every tensor once, and the names that stand for another one."""
    tensors, tied = {}, {}
    seen: dict[object, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name!r} is {type(value).__name__}, not a tensor")
        if is_sharded(value):
            raise ValueError(f"{name!r} is sharded over processes: gather the state dict first")
        known = str(value.dtype).removeprefix("torch.") in DTYPES
        if not known or value.layout != torch.strided or value.device.type == "meta":
            raise ValueError(
                f"{name!r} is a {value.layout} tensor of {value.dtype} on {value.device}; allowed "
                f"are dense ones of {', '.join(DTYPES)}"
            )
        place = value.data_ptr(), value.device, value.dtype, value.shape, value.stride()
        if value.numel() and place in seen:
            tied[name] = seen[place]
            continue
        seen[place] = name
        tensors[name] = value
    return tensors, tied


def _layouts(
    model: nn.Module | Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Layout]:
    """Returns what is compressible, and how layers use it."""
    if not isinstance(model, nn.Module):
        return {
            name: PLAIN
            for name, value in tensors.items()
            if value.dtype.is_floating_point and value.dtype.itemsize > 1 and value.dim() > 1
        }
    weights = layer_weights(model)
    return {name: layout_of(weights, name) for name in weights if name in tensors}


def _write(path: Path, parts: dict[str, Tensor], manifest: Manifest) -> None:
    from safetensors.torch import save_file

    text = manifest.to_json()
    with written_aside(path) as aside:
        save_file(parts, aside, {MANIFEST: text, CHECKSUM: digest_of(text)})
        let_read(aside)
