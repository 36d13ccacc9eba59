"""GGUF files of compressed Llama models, for llama.cpp and programs built on it.

A GGUF file is made from another one, the source that the model was read from: architecture,
tokenizer and chat template are copied from it, and its tensors are replaced by the weights of the
model.

Matrices are stored in one of four types. Q8_0 and Q4_0 have blocks of 32 consecutive inputs with a
scale s in float16: a weight is q s with -127 <= q <= 127, or with -8 <= q <= 7. The integers of
`Quantize` fit into these blocks as they are if a block does not have two scales; then only their
scales are rounded, from float32 to float16. All other weights are rounded by the package `gguf`.

Llama of Transformers rotates features i and i + d/2 of a head with d features together, and GGUF
rotates features 2i and 2i + 1, so the rows of the query and key projections are in another order.
"""

from __future__ import annotations

import importlib.util
import re
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchcram.artifact.integers import fit
from torchcram.files import written_aside
from torchcram.messages import list_names
from torchcram.operators.parse import parse_without_pruners
from torchcram.operators.quantize import Quantize, quantizer_of
from torchcram.weights import weights_in

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from torchcram.operators import Operator
    from torchcram.weights import Weights

__all__ = ["save_gguf"]

BLOCK = 32  # inputs that share a scale
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_0": 2}  # types of tensors, and `general.file_type`
TYPES = tuple(FILE_TYPES)
_OPERATOR = "torchcram.operator"
_WRITTEN = (  # metadata that is not copied
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    _OPERATOR,
)
_BITS = {"q8_0": 8, "q4_0": 4}
_ARCHITECTURE = "llama"
_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class StoredTensor(NamedTuple):
    """A tensor as it is stored.

    Attributes:
        name: Name of the weight in the model of Transformers.
        kind: Type, one of `TYPES`.
        data: Values, or the bytes of blocks, of shape (rows, bytes).
    """

    name: str
    kind: str
    data: np.ndarray[Any, Any]


class StoredModel(NamedTuple):
    """A model as it is stored.

    Attributes:
        source: `GGUFReader` of the file that metadata is copied from.
        operator: Text of the operator that the model was compressed with; None if it was not.
        kind: Type of compressed weights, one of `TYPES`.
        tensors: Tensors by their names in the file, in the order of the source.
    """

    source: Any
    operator: str | None
    kind: str
    tensors: dict[str, StoredTensor]


def save_gguf(
    model: nn.Module,
    path: str | PathLike[str],
    source: str | PathLike[str],
    *,
    operator: Operator | str | None = None,
    weights: Weights | None = None,
    kind: str | None = None,
) -> None:
    """Writes a Llama model as a GGUF file, whole or not at all.

    Norms and biases are stored in float32. If `kind` is "q8_0" or "q4_0", weights that are not in
    `weights`, such as embeddings, have the type Q8_0, and layers whose number of inputs is not a
    multiple of 32 the type F16.

    Args:
        model: Model of Transformers of the Llama architecture, which was read from `source`.
        path: Path of the file to write.
        source: Path of the GGUF file that all metadata is copied from.
        operator: Operator that the model was compressed with, or its text, such as "int8" or
            "nm:2:4+int4:g64"; None if it was not compressed.
        weights: Weights that were compressed; by default all `compressible_weights(model)`.
        kind: Type that they are stored in: "f32", "f16", "q8_0" or "q4_0". By default it is "q4_0"
            for operators that quantize to 2, 3 or 4 bits, "q8_0" for 5 to 8 bits, and "f16" for
            others.

    Raises:
        ValueError: If the package `gguf` is missing, `source` is not the GGUF file of a Llama model
            with the layers of `model`, or weights cannot be stored in the type.
    """
    write(path, encode(model, source, operator=operator, weights=weights, kind=kind))


def choose_type(operator: Operator | str | None, kind: str | None = None) -> str:
    """Returns the type of compressed weights.

    Args:
        operator: Operator that a model is compressed with.
        kind: Type, one of `TYPES`, or None for one that fits the operator.

    Raises:
        ValueError: If there is no such type, or the integers of the operator do not fit into the
            blocks of the type that would be chosen.
    """
    if kind is not None:
        if kind not in TYPES:
            raise ValueError(f"GGUF type {kind!r}: allowed are {', '.join(TYPES)}")
        return kind
    quantize = _quantizer(operator)
    if quantize is None:
        return "f16"
    chosen = "q4_0" if quantize.bits <= _BITS["q4_0"] else "q8_0"
    if not _keeps_integers(quantize, chosen):
        raise ValueError(
            f"{operator}: groups of {quantize.group_size} do not fit into the blocks of {BLOCK} "
            f"that {chosen} of GGUF has; allowed are multiples of {BLOCK}, or a type given by "
            "name, to which weights are rounded again"
        )
    return chosen


def check_source(model: nn.Module, source: str | PathLike[str]) -> None:
    """Raises ValueError unless a GGUF file has the architecture and the tensors of a model.

    Args:
        model: Model of Transformers.
        source: Path of the GGUF file.

    Raises:
        ValueError: If the package `gguf` is missing, the file cannot be read, or it does not fit.
    """
    _tensor_names(model, _read(source), source)


def require_package() -> None:
    """Raises ValueError if the package `gguf` is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("GGUF files need the package gguf: pip install gguf")


@torch.no_grad()
def encode(
    model: nn.Module,
    source: str | PathLike[str],
    *,
    operator: Operator | str | None = None,
    weights: Weights | None = None,
    kind: str | None = None,
) -> StoredModel:
    """Returns a model as it is stored in a GGUF file.

    The arguments and errors are those of `save_gguf`.
    """
    kind = choose_type(operator, kind)
    reader = _read(source)
    names = _tensor_names(model, reader, source)
    chosen = weights_in(model, weights)
    state = model.state_dict()
    tensors = {}
    for stored, name in names.items():
        value = state[name].detach().float().cpu()
        if (heads := _rotated_heads(model, stored)) is not None:
            value = to_gguf_order(value, heads)
        quantize = _quantizer(operator) if name in chosen else None
        as_type = kind if name in chosen or kind not in _BITS else "q8_0"
        tensors[stored] = _encode(name, value.contiguous(), as_type, quantize)
    return StoredModel(reader, None if operator is None else str(operator), kind, tensors)


@torch.no_grad()
def round_as_stored_(model: nn.Module, stored: StoredModel) -> None:
    """Gives a model the values that its weights have in a GGUF file, in place.

    Args:
        model: Model that was encoded.
        stored: The model as `encode` returned it.
    """
    state = model.state_dict()
    for name, tensor in stored.tensors.items():
        value = torch.from_numpy(_decode(tensor))
        if (heads := _rotated_heads(model, name)) is not None:
            value = from_gguf_order(value, heads)
        state[tensor.name].copy_(value)


def write(path: str | PathLike[str], stored: StoredModel) -> None:
    """Writes a GGUF file, whole or not at all.

    Metadata is that of the source, with the type of the weights and the operator. Arrays without
    elements are left out, because the package `gguf` does not write them.

    Args:
        path: Path of the file.
        stored: The model as `encode` returned it.
    """
    import gguf

    with written_aside(Path(path)) as aside:
        writer = gguf.GGUFWriter(aside, _ARCHITECTURE)
        writer.data_alignment = int(stored.source.alignment)
        _copy_metadata(stored.source, writer)
        writer.add_file_type(FILE_TYPES[stored.kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if stored.operator is not None:
            writer.add_string(_OPERATOR, stored.operator)
        for name, tensor in stored.tensors.items():
            writer.add_tensor(name, tensor.data, raw_dtype=_gguf_type(tensor.kind))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            # not `write_tensors_to_file`: `tofile` of numpy does not report a full disk reliably
            (file,) = writer.fout
            writer.write_padding(file, file.tell())
            for tensor in stored.tensors.values():
                file.write(tensor.data)
                writer.write_padding(file, tensor.data.nbytes)
        finally:
            writer.close()


def to_gguf_order(value: Tensor, heads: int) -> Tensor:
    """Moves rows i and i + d/2 of every head with d rows to rows 2i and 2i + 1.

    Args:
        value: Weight or bias of a query or key projection as Transformers has it.
        heads: Number of heads.
    """
    halves = value.reshape(heads, 2, -1, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def from_gguf_order(value: Tensor, heads: int) -> Tensor:
    """Moves rows 2i and 2i + 1 of every head with d rows to rows i and i + d/2.

    Args:
        value: Weight or bias of a query or key projection as GGUF has it.
        heads: Number of heads.
    """
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def pack_blocks(codes: Tensor, scales: Tensor, kind: str) -> np.ndarray[Any, Any]:
    """Returns integers and scales as blocks of Q8_0 or Q4_0.

    Args:
        codes: Integers in int8, of shape (rows, inputs).
        scales: Scales of shape (rows, groups); a group has inputs / groups integers, a multiple of
            32.
        kind: "q8_0" or "q4_0".

    Returns:
        Bytes of shape (rows, bytes): for each block its scale in float16 and its integers.
    """
    import numpy as np

    rows, inputs = codes.shape
    groups = scales.shape[1]
    each = scales.repeat_interleave(inputs // groups // BLOCK, 1).reshape(-1, 1)
    with np.errstate(over="ignore"):  # scales that are too large are found when they are decoded
        halves = each.numpy().astype("<f2").view(np.uint8)
    integers = codes.reshape(-1, BLOCK)
    if kind == "q4_0":  # a byte has integers j and j + 16, the first in its low bits
        unsigned = (integers.short() + 8).to(torch.uint8)
        integers = unsigned[:, : BLOCK // 2] | (unsigned[:, BLOCK // 2 :] << 4)
    blocks = np.concatenate([halves, integers.numpy().view(np.uint8)], axis=1)
    return blocks.reshape(rows, -1)


def _encode(name: str, value: Tensor, kind: str, quantize: Quantize | None) -> StoredTensor:
    import numpy as np
    from gguf import quants

    if value.dim() == 1:
        kind = "f32"
    elif kind in _BITS and value.shape[1] % BLOCK:
        kind = "f16"
    if kind in _BITS and quantize is not None and _keeps_integers(quantize, kind):
        data = _encode_integers(name, value, kind, quantize)
    else:
        with np.errstate(over="ignore"):
            data = quants.quantize(value.numpy(), _gguf_type(kind))
    encoded = StoredTensor(name, kind, np.ascontiguousarray(data))
    if not np.isfinite(_decode(encoded)).all():
        raise ValueError(f"GGUF: {name} has values that are not finite as {kind}")
    return encoded


def _encode_integers(
    name: str, value: Tensor, kind: str, quantize: Quantize
) -> np.ndarray[Any, Any]:
    outputs, inputs = value.shape
    size = quantize.group_size
    if size is None or inputs % size:
        size = inputs
    fitted = fit(value.reshape(-1, size), quantize.bits)
    if fitted is None:
        raise ValueError(
            f"GGUF: no scales reproduce the values of {name} with {quantize.bits} bits, so "
            f"{quantize} did not make them"
        )
    codes, scales = fitted
    minus_zero = -(1 << (quantize.bits - 1))
    integers = torch.where(codes == minus_zero, 0, codes)
    return pack_blocks(integers.view(outputs, inputs), scales.view(outputs, -1), kind)


def _decode(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    """Returns the values of a tensor in float32."""
    from gguf import quants

    values: np.ndarray[Any, Any] = quants.dequantize(tensor.data, _gguf_type(tensor.kind))
    return values


def _keeps_integers(quantize: Quantize, kind: str) -> bool:
    """Returns whether the integers of a quantizer can be stored in a type as they are."""
    size = quantize.group_size
    return quantize.bits <= _BITS[kind] and (size is None or size % BLOCK == 0)


def _quantizer(operator: Operator | str | None) -> Quantize | None:
    read = parse_without_pruners(operator) if isinstance(operator, str) else operator
    return quantizer_of(read)


def _gguf_type(kind: str) -> Any:  # noqa: ANN401
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[kind.upper()]


def _read(source: str | PathLike[str]) -> Any:  # noqa: ANN401
    """Opens a GGUF file of the Llama architecture."""
    require_package()
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        architecture = reader.fields["general.architecture"].contents()
    except OSError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        raise ValueError(f"{source} cannot be read as a GGUF file: {error}") from error
    if architecture != _ARCHITECTURE:
        raise ValueError(
            f"{source} has the architecture {architecture}; only {_ARCHITECTURE} can be written as "
            "GGUF"
        )
    return reader


def _tensor_names(
    model: nn.Module,
    reader: Any,  # noqa: ANN401
    source: str | PathLike[str],
) -> dict[str, str]:
    """Returns the name of the weight for every tensor of a file.

    Raises:
        ValueError: If tensors or weights are left over, or have other shapes.
    """
    state = model.state_dict()
    shapes = {tensor.name: tuple(map(int, tensor.shape[::-1])) for tensor in reader.tensors}
    names = {tensor: _weight_name(tensor) for tensor in shapes}
    strange = [tensor for tensor, name in names.items() if name not in state]
    if strange:
        raise ValueError(
            f"{source} has tensors that {type(model).__name__} has no weights for: "
            f"{list_names(strange)}"
        )
    known = {tensor: name for tensor, name in names.items() if name is not None}
    stored = {state[name].data_ptr() for name in known.values()}  # tied weights are stored once
    missing = [name for name, value in state.items() if value.data_ptr() not in stored]
    if missing:
        raise ValueError(f"{source} has no tensors for the weights {list_names(missing)}")
    for tensor, name in known.items():
        if tuple(state[name].shape) != shapes[tensor]:
            raise ValueError(
                f"{source}: {tensor} has the shape {shapes[tensor]}, and {name} of the model "
                f"{tuple(state[name].shape)}"
            )
    return known


def _weight_name(tensor: str) -> str | None:
    """Returns the name in Transformers of a tensor of GGUF; None if it has none."""
    stem, _, leaf = tensor.rpartition(".")
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{leaf}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None or block[2] not in _LAYERS:
        return None
    return f"model.layers.{block[1]}.{_LAYERS[block[2]]}.{leaf}"


def _rotated_heads(model: Any, tensor: str) -> int | None:  # noqa: ANN401
    """Returns the number of heads of a query or key projection; None for other tensors."""
    heads: int | None = None
    if ".attn_q." in tensor:
        heads = model.config.num_attention_heads
    elif ".attn_k." in tensor:
        heads = model.config.num_key_value_heads
    return heads


def _copy_metadata(reader: Any, writer: Any) -> None:  # noqa: ANN401
    """Copies metadata, except what is written for every file; texts are copied byte by byte."""
    from gguf import GGUFValueType

    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in _WRITTEN:
            continue
        kind, element = field.types[0], field.types[-1]
        is_text = element == GGUFValueType.STRING
        parts = [field.parts[index] for index in field.data]
        values = [part.tobytes() if is_text else part.tolist()[0] for part in parts]
        if kind != GGUFValueType.ARRAY:
            writer.add_key_value(key, values[0], kind)
        elif values:
            writer.add_key_value(key, values, kind, sub_type=element)
