"""Compressed models as ONNX files, checked in ONNX Runtime before they are put in place.

Zeros are in the weights. Quantized weights are int8 or int4 with a DequantizeLinear behind them, so
that the file is as small as they are. Needs `pip install "torchcram[export]"`.
"""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.files import written_aside
from torchcram.operators import as_operator
from torchcram.passes import eval_mode
from torchcram.runtime.onnx_check import check, check_dims, check_dtypes, check_example
from torchcram.runtime.onnx_graph import Stored, put_integers, strip
from torchcram.runtime.onnx_integers import find_integers, quantizer_of
from torchcram.weights import weights_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from torch import nn
    from torch.export import Dim
    from torch.onnx import ONNXProgram

    from torchcram.operators import Operator
    from torchcram.weights import Weights

OPSET = 21  # the first with int4 and with one scale per block
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST = 2**31 - 2**20  # what a file can hold, with room for the graph


def export_onnx(
    model: nn.Module,
    example: tuple[Tensor, ...],
    path: str | PathLike[str],
    *,
    operator: Operator | str | None = None,
    weights: Weights | None = None,
    dynamic_batch: bool = True,
    dynamic_dims: Sequence[Mapping[int, Dim]] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Writes `model`, in eval mode, to an ONNX file that gives the same outputs.

    Before the file is put in place, ONNX Runtime runs it on `example` and, with a dynamic batch, on
    one more sample, and on the example cut to half along the other dynamic dimensions; the outputs
    are compared with those of PyTorch. After an error, what was at `path` is still there and
    nothing else.

    Args:
        model: compressed already, in float32.
        example: real inputs, by position.
        path: of the file.
        operator: what the model was compressed with, or its text. Where it quantizes, weights are
            stored as integers: int4 for 4 bits, else int8.
        weights: what was compressed; by default all `compressible_weights(model)`.
        dynamic_batch: leave open how many samples there are, the first dimension of every input.
        dynamic_dims: what else to leave open, for each input by dimension, such as
            `[{1: torch.export.Dim("tokens", max=384)}]`.
        input_names: in the order of `example`; by default the names that `forward` has for them.
        output_names: in the order in which the outputs are returned.

    Raises:
        ImportError: naming the package that is missing.
        ValueError: naming the input, weight, operation or output that is at fault.
    """
    for package in PACKAGES:
        importlib.import_module(package)  # what is missing is named before the work begins
    operator = None if operator is None else as_operator(operator)
    check_example(example, dynamic_batch, input_names)
    check_dims(example, dynamic_dims)
    dims = dynamic_dims or [{} for _ in example]
    check_dtypes(model)
    stored = _stored(model, operator, weights)
    model, example = _on_cpu(model, example)
    with eval_mode(model), torch.no_grad():
        program = _export(model, example, _shapes(dims, dynamic_batch), input_names, output_names)
        put_integers(program.model, stored)
        program.optimize()
        strip(program.model)
        if operator is not None:
            program.model.metadata_props["torchcram.operator"] = str(operator)
        _check_size(program)
        with written_aside(Path(path)) as aside:
            program.save(aside)
            check(aside, model, _batches(example, dims, dynamic_batch))


def _stored(model: nn.Module, operator: Operator | None, weights: Weights | None) -> list[Stored]:
    """Returns the integers of every quantized weight, with all names of a tied one."""
    quantize = quantizer_of(operator)
    if quantize is None:
        return []
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    chosen = weights_in(model, weights)
    bits = 4 if quantize.bits == 4 else 8
    return [
        Stored(frozenset(names[id(weight)]), find_integers(chosen, name, quantize), bits)
        for name, weight in chosen.items()
    ]


def _export(
    model: nn.Module,
    example: tuple[Tensor, ...],
    shapes: tuple[dict[int, Dim], ...] | None,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> ONNXProgram:
    if shapes is not None and 0 in shapes[0] and example[0].shape[0] == 1:
        # torch.export takes a size of 1 for a constant
        example = tuple(torch.cat([value, value]) for value in example)
    try:
        with warnings.catch_warnings():
            # inputs have the same batch, or tokens, and are told so
            warnings.filterwarnings("ignore", "# The axis name: .* will not be used")
            # what the exporter does itself where there are recurrent layers
            warnings.filterwarnings("ignore", "_check_is_size will be removed")
            warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights")
            program = torch.onnx.export(
                model,
                example,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=shapes,
                input_names=input_names,
                output_names=output_names,
                optimize=False,  # it would fold weights away that are to become integers
                verbose=False,
            )
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be exported: {_reason(error)}") from error
    assert program is not None  # noqa: S101
    outputs = len(program.model.graph.outputs)
    if output_names is not None and len(output_names) != outputs:
        raise ValueError(f"{outputs} outputs, but the output_names are {list(output_names)}")
    return program


def _reason(error: Exception) -> str:
    """What the exporter says went wrong, without its advice how to change the exporter."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    summary = text.split("## Exception summary", 1)[-1]
    return summary.split("(Refer to the full stack trace", 1)[0].strip()


def _on_cpu(model: nn.Module, example: tuple[Tensor, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Moves a copy to the CPU, where PyTorch and ONNX Runtime are compared."""
    if any(value.device.type != "cpu" for value in model.state_dict().values()):
        model = copy.deepcopy(model).cpu()
    return model, tuple(value.detach().cpu() for value in example)


def _shapes(
    dims: Sequence[Mapping[int, Dim]], dynamic_batch: bool
) -> tuple[dict[int, Dim], ...] | None:
    batch = {0: torch.export.Dim("batch")} if dynamic_batch else {}
    shapes = tuple({**batch, **one} for one in dims)
    return shapes if any(shapes) else None


def _batches(
    example: tuple[Tensor, ...], dims: Sequence[Mapping[int, Dim]], dynamic_batch: bool
) -> list[tuple[Tensor, ...]]:
    """The example, another number of samples, and half of what else is dynamic."""
    found = [example]
    if dynamic_batch:
        found.append(tuple(torch.cat([value, value[:1]]) for value in example))
    if any(dims):
        cut = list(example)
        for place, some in enumerate(dims):
            for dim in some:
                cut[place] = cut[place].narrow(dim, 0, -(-cut[place].shape[dim] // 2))
        found.append(tuple(value.contiguous() for value in cut))
    return found


def _check_size(program: ONNXProgram) -> None:
    size = sum(
        value.const_value.nbytes
        for value in program.model.graph.initializers.values()
        if value.const_value is not None
    )
    if size > LARGEST:
        raise ValueError(f"the weights take {size / 2**30:.1f} GiB; one ONNX file holds 2")
