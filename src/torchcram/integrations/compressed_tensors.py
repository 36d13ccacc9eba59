"""Folders of Transformers whose quantized weights are packed integers, for `compressed-tensors`.

The package `compressed-tensors` adds this format to `from_pretrained` of Transformers; it is not
needed to write it. The format is called "pack-quantized". In place of `layer.weight`, of shape
(outputs, inputs), a Linear layer has

- `layer.weight_packed`, int32 of shape (outputs, words): the integers q of every output, each with
  2^(bits-1) added so that it is not negative. 32 / bits integers share a word, the first in the
  lowest bits, and the last word of an output is filled up with zeros;
- `layer.weight_scale`, of shape (outputs, 1), or (outputs, inputs / group size): the scales s;
- `layer.weight_shape`, int64: outputs and inputs.

The weight is q s. `quantization_config` in config.json names the number of bits and the group size,
and the layers that are not quantized. The layout of words for numbers of bits that do not divide 32
differs between versions of `compressed-tensors`, so those are not written.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchcram.artifact.integers import fit, pack
from torchcram.files import let_read
from torchcram.messages import list_names
from torchcram.operators.parse import parse_without_pruners
from torchcram.operators.quantize import Quantize, quantizer_of
from torchcram.weights import weights_in

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.operators import Operator
    from torchcram.weights import Weights

__all__ = ["save_compressed_tensors"]

BITS = (2, 4, 8)
"""Numbers of bits that can be written."""

METHOD, FORMAT = "compressed-tensors", "pack-quantized"  # in `quantization_config`
PACKED = "weight_packed"


def save_compressed_tensors(
    model: nn.Module,
    folder: str | PathLike[str],
    operator: Operator | str,
    *,
    weights: Weights | None = None,
) -> None:
    """Saves a quantized model for `from_pretrained` of Transformers, its integers packed.

    Loading needs the package `compressed-tensors` and gives back every weight exactly, except that
    -0.0 becomes 0.0. Zeros of a pruned model are stored like all other integers. Everything is
    checked and packed before the first file is written.

    Args:
        model: Quantized model of Transformers, in float32.
        folder: Folder to write into; it need not exist.
        operator: Operator that the model was compressed with, or its text, such as "int8" or
            "nm:2:4+int4:g64".
        weights: Weights that were compressed; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If the model is not of Transformers, the operator does not quantize to 2, 4 or 8
            bits, or a weight is not of a Linear layer, not in float32, shared by several layers or
            not what the operator makes.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{METHOD}: {type(model).__name__} is not a model of Transformers")
    quantize = read_quantizer(operator)
    chosen = weights_in(model, weights)
    check_layers(model, chosen)
    state: dict[str, Tensor] = dict(model.state_dict())
    group_sizes: dict[str, int | None] = {}
    for name, weight in chosen.items():
        layer = name.removesuffix(".weight")
        size = quantize.group_size
        group_sizes[layer] = None if size is None or weight.shape[1] % size else size
        del state[name]
        for part, tensor in _pack_weight(name, weight, quantize.bits, group_sizes[layer]).items():
            state[f"{layer}.{part}"] = tensor
    folder = Path(folder)
    model.save_pretrained(folder, state_dict=state)
    _check_files(folder, len(group_sizes))
    _add_to_config(folder, _quantization_config(model, quantize.bits, group_sizes))
    for path in folder.glob("*.safetensors"):
        let_read(path)


def read_quantizer(operator: Operator | str) -> Quantize:
    """Returns the quantizer of an operator.

    Raises:
        ValueError: If it does not quantize, or to a number of bits that cannot be written.
    """
    read = parse_without_pruners(operator) if isinstance(operator, str) else operator
    quantize = quantizer_of(read)
    allowed = "allowed are int2, int4 and int8, with or without a group size and a pattern of zeros"
    if quantize is None:
        raise ValueError(f"{METHOD}: {operator} does not quantize; {allowed}")
    if quantize.bits not in BITS:
        raise ValueError(f"{METHOD}: {operator} has integers of {quantize.bits} bits; {allowed}")
    return quantize


def check_layers(model: nn.Module, weights: Weights) -> None:
    """Raises ValueError unless all weights are those of Linear layers, and of one layer each.

    Args:
        model: Model that the weights are part of.
        weights: Weights that are to be packed.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        path, _, leaf = name.rpartition(".")
        layer = model.get_submodule(path)
        if not isinstance(layer, nn.Linear) or leaf != "weight":
            raise ValueError(
                f"{METHOD}: {name} belongs to a layer of type {type(layer).__name__}; only those "
                "of nn.Linear can be packed"
            )
        shared = [other for other, parameter in parameters if parameter is weight]
        if len(shared) > 1:
            raise ValueError(
                f"{METHOD}: {list_names(shared)} are one tensor; only weights of a single layer "
                "can be packed"
            )


def pack_words(integers: Tensor, bits: int) -> Tensor:
    """Packs signed integers into words of 32 bits, row by row.

    Args:
        integers: Integers from -2^(bits-1) to 2^(bits-1) - 1, int8 of shape (rows, columns).
        bits: Number of bits of an integer, one of `BITS`.

    Returns:
        Words as int32, of shape (rows, words); each holds 32 / bits integers, lowest bits first.
    """
    rows, columns = integers.shape
    missing = -columns % (32 // bits)
    unsigned = (integers.cpu().short() + (1 << (bits - 1))).to(torch.uint8)
    filled = nn.functional.pad(unsigned, (0, missing))
    return pack(filled.flatten(), bits).view(torch.int32).view(rows, -1)


@torch.no_grad()
def _pack_weight(name: str, weight: Tensor, bits: int, group_size: int | None) -> dict[str, Tensor]:
    """Returns the tensors that stand for a weight, by the ends of their names."""
    if weight.dtype != torch.float32:
        raise ValueError(f"{METHOD}: {name} is {weight.dtype}; only torch.float32 can be packed")
    outputs, inputs = weight.shape
    fitted = fit(weight.reshape(-1, group_size or inputs), bits)
    if fitted is None:
        raise ValueError(
            f"{METHOD}: no scales reproduce the values of {name} with {bits} bits, so the "
            "operator did not make them"
        )
    codes, scales = fitted
    lowest = -(1 << (bits - 1))  # the code of -0.0
    integers = torch.where(codes == lowest, 0, codes).view(outputs, inputs)
    return {
        PACKED: pack_words(integers, bits),
        "weight_scale": scales.view(outputs, -1).cpu(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _check_files(folder: Path, layers: int) -> None:
    """Raises ValueError unless the files of a folder have the packed weights of all layers.

    Transformers may have saved them under other names, which it turns back when it loads them.
    """
    from safetensors import safe_open

    written = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written += sum(name.endswith(f".{PACKED}") for name in file.keys())  # noqa: SIM118
    if written != layers:
        raise ValueError(
            f"{METHOD}: Transformers saved the packed weights of {written} layers instead of "
            f"{layers}"
        )


def _quantization_config(
    model: nn.Module, bits: int, group_sizes: dict[str, int | None]
) -> dict[str, Any]:
    """Returns `quantization_config`: what is quantized, and how.

    Args:
        model: Model of Transformers.
        bits: Number of bits of an integer.
        group_sizes: Group size of every quantized layer; None for one scale per output.
    """
    groups = {}
    # layers that are named come first: the first target that matches a layer counts
    sizes = sorted(set(group_sizes.values()), key=lambda size: size is not None)
    for number, size in enumerate(sizes):
        layers = [layer for layer, its_size in group_sizes.items() if its_size == size]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if number == len(sizes) - 1 else layers,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": True,
                "strategy": "channel" if size is None else "group",
                "group_size": size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": FORMAT,
        }
    dense = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.Embedding)) and name not in group_sizes
    ]
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": dense,
    }


def _add_to_config(folder: Path, quantization: dict[str, Any]) -> None:
    """Adds `quantization_config` to the configuration of a model."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = quantization
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
