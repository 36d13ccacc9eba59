"""Compressed models as ONNX files, checked in ONNX Runtime before they are put in place.

Zeros are in the weights. Quantized weights are int8 or int4 with a DequantizeLinear behind them, so
that the file is as small as they are. Needs `pip install "torchcram[export]"`.
"""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcram.files import written_aside
from torchcram.operators import as_operator
from torchcram.operators.parse import parse_without_pruners
from torchcram.passes import eval_mode
from torchcram.runtime.integers import (
    find_integers,
    find_quantizer,
    quantizer_of,
    stored_bits,
)
from torchcram.runtime.onnx.check import check, check_dims, check_dtypes, check_example
from torchcram.runtime.onnx.example import Example
from torchcram.runtime.onnx.graph import (
    Stored,
    free_names,
    name_outputs,
    optimize,
    put_integers,
    strip,
)
from torchcram.weights import layer_weights, weights_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.export import Dim
    from torch.onnx import ONNXProgram

    from torchcram.operators import Operator
    from torchcram.runtime.cpu.replace_layers import Inputs
    from torchcram.weights import Weights

OPSET = 21  # the first with int4 and with one scale per block
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST = 2**31 - 2**20  # what a file can hold, with room for the graph


def export_onnx(
    model: nn.Module,
    path: str | PathLike[str],
    example: Inputs,
    *,
    operator: Operator | str | None = None,
    weights: Weights | None = None,
    dynamic_batch: bool = True,
    dynamic_dims: Sequence[Mapping[int, Dim]] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Writes `model`, in eval mode, to an ONNX file that gives the same outputs.

    Quantized weights are stored as integers, int4 for 4 bits, else int8; what they were quantized
    with is seen from the weights. Before the file is put in place, ONNX Runtime runs it on
    `example` and, with a dynamic batch, on one more sample, and on the example cut to half along
    the other dynamic dimensions; the outputs are compared with those of PyTorch. After an error,
    what was at `path` is still there and nothing else.

    Args:
        model: Compressed model in float32.
        path: Path of the file.
        example: Real inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            Arguments that are no tensors are fixed in the file.
        operator: Operator that the model was compressed with, or its text; kept in the file. Where
            it quantizes, every weight has to be what it makes.
        weights: Weights that were compressed; by default all `compressible_weights(model)`.
        dynamic_batch: Whether the number of samples is left open, the first dimension of every
            input.
        dynamic_dims: Other dimensions to leave open, for each input by dimension, such as
            `[{1: torch.export.Dim("tokens", max=384)}]`.
        input_names: Names of the inputs, in the order of `example`; by default those of the
            arguments.
        output_names: Names of the outputs, in the order in which they are returned; by default the
            keys or fields of what the model returns, "output" for a single tensor, or "output_0"
            and so on for a tuple.

    Raises:
        ImportError: naming the package that is missing.
        ValueError: naming the input, weight, operation or output that is at fault.
    """
    if isinstance(example, (str, PathLike)) and not isinstance(path, (str, PathLike)):
        warnings.warn(
            "export_onnx(model, example, path) is deprecated: call "
            "export_onnx(model, path, example)",
            DeprecationWarning,
            stacklevel=2,
        )
        path, example = example, path
    if not isinstance(path, (str, PathLike)):
        raise ValueError(f"path must be a str or a path, got {type(path).__name__}")
    for package in PACKAGES:
        importlib.import_module(package)  # what is missing is named before the work begins
    inputs = Example.of(example)
    read = _without_pruners(operator)
    check_example(inputs, dynamic_batch, input_names)
    check_dims(inputs, dynamic_dims)
    dims = dynamic_dims or [{} for _ in inputs.tensors]
    check_dtypes(model)
    stored = _stored(model, read, weights)
    model, inputs = _on_cpu(model, inputs)
    with eval_mode(model), torch.no_grad():
        shapes = _shapes(inputs, dims, dynamic_batch)
        program = _export(model, _two_samples(inputs, dynamic_batch), shapes, input_names)
        names = _output_names(program, inputs.run(model), output_names)
        put_integers(program.model, stored)
        optimize(program)
        strip(program.model)
        name_outputs(program.model, names)
        if operator is not None:
            program.model.metadata_props["torchcram.operator"] = str(operator)
        _check_size(program)
        with written_aside(Path(path)) as aside:
            program.save(aside)
            check(aside, model, _batches(inputs, dims, dynamic_batch))


def _without_pruners(operator: Operator | str | None) -> Operator | None:
    """Reads an operator; what its pruners look at does not matter here."""
    if isinstance(operator, str):
        return parse_without_pruners(operator)
    return None if operator is None else as_operator(operator)


def _stored(model: nn.Module, operator: Operator | None, weights: Weights | None) -> list[Stored]:
    """Returns the integers of every quantized weight, with all names of a tied one."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    told = quantizer_of(operator)
    chosen = layer_weights(model) if weights is None else weights_in(model, weights)
    stored = []
    for name, weight in chosen.items():
        quantize = told or find_quantizer(chosen, name)
        if quantize is not None:
            integers = find_integers(chosen, name, quantize)
            every = frozenset(names[id(weight)])
            stored.append(Stored(every, integers, stored_bits(quantize.bits)))
    return stored


def _export(
    model: nn.Module,
    example: Example,
    shapes: dict[str, Any] | tuple[Any, ...] | None,
    input_names: Sequence[str] | None,
) -> ONNXProgram:
    try:
        with warnings.catch_warnings():
            # inputs have the same batch, or tokens, and are told so
            warnings.filterwarnings("ignore", "# The axis name: .* will not be used")
            # what the exporter does itself where there are recurrent layers
            warnings.filterwarnings("ignore", "_check_is_size will be removed")
            warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights")
            # with constants among the arguments, open dimensions have names of the exporter
            warnings.filterwarnings("ignore", "# ONNX model has different number of inputs")
            program = torch.onnx.export(
                model,
                example.args,
                kwargs=example.kwargs,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=shapes,
                input_names=input_names,
                optimize=False,  # it would fold weights away that are to become integers
                verbose=False,
            )
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be exported: {_reason(error)}") from error
    assert program is not None  # noqa: S101
    return program


def _output_names(program: ONNXProgram, returned: object, given: Sequence[str] | None) -> list[str]:
    """Returns the names of the outputs: those given, or those that the model has for them."""
    count = len(program.model.graph.outputs)
    if given is not None:
        if len(given) != count:
            raise ValueError(f"{count} outputs, but the output_names are {list(given)}")
        return list(given)
    names = _names_in(returned, "output", outermost=True)
    if len(names) != count:  # outputs in a container of a kind of its own
        names = [f"output_{index}" for index in range(count)]
    return free_names(program.model, names)


def _names_in(returned: object, name: str, *, outermost: bool = False) -> list[str]:
    """Returns names for the tensors in what a model returns, in the order of the outputs."""
    if isinstance(returned, Tensor):
        return [name]
    if isinstance(returned, Mapping):
        inner = [(str(key), value) for key, value in returned.items()]
    elif isinstance(returned, tuple) and (fields := getattr(returned, "__match_args__", ())):
        inner = list(zip(fields, returned, strict=True))  # named tuples, of torch too
    elif isinstance(returned, (tuple, list)):
        return [
            found
            for index, value in enumerate(returned)
            for found in _names_in(value, f"{name}_{index}")
        ]
    else:
        return []
    prefix = "" if outermost else f"{name}_"
    return [found for key, value in inner for found in _names_in(value, f"{prefix}{key}")]


def _reason(error: Exception) -> str:
    """What the exporter says went wrong, without its advice how to change the exporter."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    summary = text.split("## Exception summary", 1)[-1]
    return summary.split("(Refer to the full stack trace", 1)[0].strip()


def _on_cpu(model: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """Moves a copy to the CPU, where PyTorch and ONNX Runtime are compared."""
    if any(value.device.type != "cpu" for value in model.state_dict().values()):
        model = copy.deepcopy(model).cpu()
    return model, example.each(lambda value: value.detach().cpu())


def _two_samples(example: Example, dynamic_batch: bool) -> Example:
    """Returns an example whose batch torch.export does not take for a constant, as it does 1."""
    if dynamic_batch and example.shapes[0][0] == 1:
        return example.each(lambda value: torch.cat([value, value]))
    return example


def _shapes(
    example: Example, dims: Sequence[Mapping[int, Dim]], dynamic_batch: bool
) -> dict[str, Any] | tuple[Any, ...] | None:
    """Returns the dynamic dimensions of every argument; None where there are none at all."""
    batch = {0: torch.export.Dim("batch")} if dynamic_batch else {}
    shapes = [{**batch, **some} for some in dims]
    return example.for_each_tensor(shapes) if any(shapes) else None


def _batches(
    example: Example, dims: Sequence[Mapping[int, Dim]], dynamic_batch: bool
) -> list[Example]:
    """The example, another number of samples, and half of what else is dynamic."""
    batches = [example]
    if dynamic_batch:
        batches.append(example.each(lambda value: torch.cat([value, value[:1]])))
    if any(dims):
        cut = list(example.tensors.values())
        for index, some in enumerate(dims):
            for dim in some:
                cut[index] = cut[index].narrow(dim, 0, -(-cut[index].shape[dim] // 2))
        batches.append(example.with_tensors([value.contiguous() for value in cut]))
    return batches


def _check_size(program: ONNXProgram) -> None:
    size = sum(
        value.const_value.nbytes
        for value in program.model.graph.initializers.values()
        if value.const_value is not None
    )
    if size > LARGEST:
        raise ValueError(f"the weights take {size / 2**30:.1f} GiB; one ONNX file holds 2")
