"""Writes compressed models to compact files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchcram.artifact.codec import decode
from torchcram.artifact.encoder_search import Hints, store
from torchcram.artifact.format import (
    CHECKSUM,
    DTYPES,
    MANIFEST,
    MOST_DIMENSIONS,
    Encoding,
    Entry,
    Manifest,
    TensorSpec,
    crc32,
    digest,
    sha256,
)
from torchcram.files import let_read, written_aside
from torchcram.layers import layout_of
from torchcram.operators import Operator, Quantize, as_operator
from torchcram.operators.parse import parse_without_pruners
from torchcram.sharding import is_sharded
from torchcram.trained import trained_weights
from torchcram.version import __version__
from torchcram.weights import LayerWeights, layer_weights

if TYPE_CHECKING:
    from typing import Any

VALUES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST = 1024
"""Smallest number of values in a vector that is examined for zeros; smaller ones are dense."""


@torch.no_grad()
def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | PathLike[str],
    *,
    operator: Operator | str | None = None,
    values: torch.dtype | None = None,
    embeddings: Quantize | str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Manifest:
    """Writes a compressed model to one compact file, whole or not at all.

    Every floating-point tensor with zeros or quantized values is stored in the smallest encoding
    from which it can be restored bit for bit. The encoding is derived from the tensor itself, be it
    the weight of a layer, an embedding, a bare parameter or a buffer. All other tensors are stored
    unchanged.

    Args:
        model: Compressed model, or its state dict. A model also tells which layers are transposed
            convolutions, and which tensors are embeddings.
        path: Path of the file; by convention it ends in ".safetensors".
        operator: Operator that the model was compressed with, or its text; kept in the file.
        values: Type that values are rounded to unless they are quantized, float16 or bfloat16; None
            does not round. It applies to the compressible weights of a model, and to the tensors of
            a state dict with two dimensions or more. Loading returns the rounded values.
        embeddings: Quantizer that rounds the tables of embeddings, such as "int8", with a scale for
            every row; None does not round. Loading returns the rounded values.
        metadata: Metadata to keep in the file, in types of JSON: recipe, metrics, dataset.

    Returns:
        Manifest of the file.

    Raises:
        ValueError: If a tensor cannot be stored, with its name.
    """
    model, path = _in_order(model, path)
    tensors, tied = _untied(model.state_dict() if isinstance(model, nn.Module) else model)
    parts: dict[str, Tensor] = {}
    memory: set[int] = set()
    entries = {}
    for name, spec, stored in _encode_each(
        model, tensors, operator=operator, values=values, embeddings=embeddings
    ):
        entries[name] = Entry(**vars(spec), crc32=crc32(stored), sha256=sha256(stored))
        for part, key in spec.encoding.keys(name).items():
            if key in parts or key == "__metadata__":
                raise ValueError(f"{name!r} cannot be stored beside a tensor named {key!r}")
            parts[key] = _alone(stored[part], memory)
    text = None if operator is None else str(operator)
    trained = trained_weights(model) if isinstance(model, nn.Module) else []
    manifest = Manifest(entries, tied, text, __version__, dict(metadata or {}), tuple(trained))
    _write(Path(path), parts, manifest)
    return manifest


@torch.no_grad()
def round_as_saved_(
    model: nn.Module,
    *,
    operator: Operator | str | None = None,
    values: torch.dtype | None = None,
    embeddings: Quantize | str | None = None,
) -> None:
    """Gives a model the values that `load` returns after `save`, without a file.

    Args:
        model: Compressed model.
        operator: Operator as `save` takes it.
        values: Type to round values to, as `save` takes it.
        embeddings: Quantizer of the tables of embeddings, as `save` takes it.

    Raises:
        ValueError: If a tensor cannot be stored, with its name.
    """
    tensors, tied = _untied(model.state_dict())
    state = {
        name: decode(stored, spec)
        for name, spec, stored in _encode_each(
            model, tensors, operator=operator, values=values, embeddings=embeddings
        )
    }
    model.load_state_dict({**state, **{name: state[other] for name, other in tied.items()}})


def _encode_each(
    model: nn.Module | Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    *,
    operator: Operator | str | None,
    values: torch.dtype | None,
    embeddings: Quantize | str | None,
) -> Iterator[tuple[str, TensorSpec, dict[str, Tensor]]]:
    """Yields name, specification and encoded parts of every tensor; arguments as in `save`."""
    if values is not None and values not in VALUES:
        raise ValueError(f"values={values}: allowed are {', '.join(map(str, VALUES))} and None")
    known = _compressible(model)
    tables = find_tables(model, tensors)
    if embeddings is not None:
        tables = round_tables(tables, embeddings)
    hints, rounding = Hints.of(_without_pruners(operator)), Hints.of(_without_pruners(embeddings))
    for name, tensor in tensors.items():
        value = tables.get(name, tensor).detach().cpu().contiguous()
        spec = TensorSpec(dtype=value.dtype, shape=tuple(value.shape), encoding=Encoding())
        stored = {"values": value}
        if _may_be_compressed(value):
            rounded_to = values if _is_rounded(name, value, known, tables) else None
            try:
                spec, stored = store(
                    value,
                    rounding if name in tables else hints,
                    values=rounded_to,
                    used_as=layout_of(known, name) if known and name in known else None,
                )
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
        yield name, spec, stored


def _in_order(
    model: object, path: object
) -> tuple[nn.Module | Mapping[str, Tensor], str | PathLike[str]]:
    """Returns model and path, which earlier versions took in the other order."""
    if isinstance(model, (str, PathLike)) and not isinstance(path, (str, PathLike)):
        warnings.warn(
            "artifact.save(path, model) is deprecated: call artifact.save(model, path)",
            DeprecationWarning,
            stacklevel=4,  # `save` and what torch.no_grad() wraps it in lie between
        )
        model, path = path, model
    if not isinstance(model, (nn.Module, Mapping)):
        raise ValueError(f"model must be a module or a state dict, got {type(model).__name__}")
    if not isinstance(path, (str, PathLike)):
        raise ValueError(f"path must be a str or a path, got {type(path).__name__}")
    return model, path


def _alone(part: Tensor, memory: set[int]) -> Tensor:
    """Returns a tensor that shares no memory with the others, as safetensors requires."""
    address = part.untyped_storage().data_ptr()
    if part.numel() and address in memory:
        return part.clone()
    memory.add(address)
    return part


def _without_pruners(operator: Operator | str | None) -> Operator | None:
    """Returns an operator without pruners: "wanda@nm:2:4" stores weights as nm:2:4 does."""
    if operator is None or isinstance(operator, str):
        return None if operator is None else parse_without_pruners(operator)
    try:
        return parse_without_pruners(str(operator))
    except ValueError:  # an operator without a text that can be read
        return operator


def _untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns every tensor once, and the names of tied tensors with the name they are stored as."""
    tensors, tied = {}, {}
    seen: dict[object, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name!r} is {type(value).__name__}, not a tensor")
        if is_sharded(value):
            raise ValueError(f"{name!r} is sharded over processes: gather the state dict first")
        known = str(value.dtype).removeprefix("torch.") in DTYPES
        if value.dim() > MOST_DIMENSIONS:
            raise ValueError(
                f"{name!r} has {value.dim()} dimensions; allowed are up to {MOST_DIMENSIONS}"
            )
        if not known or value.layout != torch.strided or value.device.type == "meta":
            raise ValueError(
                f"{name!r} is a {value.layout} tensor of {value.dtype} on {value.device}; allowed "
                f"are dense ones of {', '.join(DTYPES)}"
            )
        memory = value.data_ptr(), value.device, value.dtype, value.shape, value.stride()
        if value.numel() and memory in seen:
            tied[name] = seen[memory]
            continue
        seen[memory] = name
        tensors[name] = value
    return tensors, tied


def _compressible(model: nn.Module | Mapping[str, Tensor]) -> LayerWeights | None:
    """Returns the compressible weights of a model; None for a state dict, which has no layers."""
    return layer_weights(model) if isinstance(model, nn.Module) else None


def _may_be_compressed(value: Tensor) -> bool:
    """Returns whether to look for zeros and integers in a tensor, which must not be too small."""
    matrix = value.dim() > 1 or value.numel() >= SMALLEST
    return matrix and value.dtype.is_floating_point and value.dtype.itemsize > 1


def _is_rounded(
    name: str, value: Tensor, known: LayerWeights | None, tables: Mapping[str, Tensor]
) -> bool:
    """Returns whether `values=` applies to a tensor."""
    if known is None:
        return value.dim() > 1
    return name in known and name not in tables


def _write(path: Path, parts: dict[str, Tensor], manifest: Manifest) -> None:
    from safetensors.torch import save_file

    text = manifest.to_json()
    with written_aside(path) as aside:
        save_file(parts, aside, {MANIFEST: text, CHECKSUM: digest(text)})
        let_read(aside)


def find_tables(
    model: nn.Module | Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns those of `tensors` that are tables of embeddings; none if `model` is a state dict.

    Args:
        model: Model, or its state dict, which does not tell embeddings from other tensors.
        tensors: State dict with tied tensors once.
    """
    if not isinstance(model, nn.Module):
        return {}
    tables = {
        module.weight.data_ptr()  # not by name: a table may be tied to another layer
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.data_ptr() in tables and tensor.dim() == 2
    }


@torch.no_grad()
def round_tables(tables: Mapping[str, Tensor], to: Quantize | str) -> dict[str, Tensor]:
    """Returns rounded copies of tables.

    Args:
        tables: Tables of embeddings by name.
        to: Quantizer, such as "int8"; every row has a scale of its own, or one scale per group.

    Raises:
        ValueError: If it is another operator, or there are no tables.
    """
    operator = as_operator(to)
    if not isinstance(operator, Quantize):
        raise ValueError(
            f"embeddings {str(to)!r}: allowed are int2 to int8, such as int8 or int4:g64"
        )
    if not tables:
        raise ValueError(
            f"embeddings {str(to)!r}: the model has none, and a state dict does not tell which "
            "tensors are embeddings"
        )
    copies = {name: table.detach().clone() for name, table in tables.items()}
    operator.compress_(copies)
    return copies
