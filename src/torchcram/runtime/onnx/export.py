"""Exporting compressed models to ONNX files, which are checked in ONNX Runtime first.

Pruned weights keep their zeros. Quantized weights are stored as int8 or int4 and dequantized by
DequantizeLinear, so that the file is small. Needs `pip install "torchcram[export]"`.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchcram.files import written_aside
from torchcram.operators import as_operator
from torchcram.operators.parse import parse_without_pruners
from torchcram.operators.quantize import quantizer_of
from torchcram.passes import eval_mode
from torchcram.runtime.integers import find_integers, find_quantizer, stored_bits
from torchcram.runtime.onnx.graph import (
    Stored,
    name_outputs,
    optimize,
    remove_metadata,
    store_integers,
    unused_names,
)
from torchcram.runtime.outputs import tensor_error
from torchcram.weights import layer_weights, weights_in

if TYPE_CHECKING:
    from torch import nn
    from torch.export import Dim
    from torch.onnx import ONNXProgram

    from torchcram.operators import Operator
    from torchcram.runtime.cpu.replace_layers import Inputs
    from torchcram.weights import Weights

OPSET = 21  # the first opset with int4 and scales per block
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # error of an output, as a fraction of its largest finite magnitude
CONSTANTS = (type(None), bool, int, float, str)
"""Types of arguments whose values are fixed in the file; they do not become inputs."""
LARGEST = 2**31 - 2**20  # bytes of weights in a file of 2 GiB, with room for the graph


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
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Exports `model` in eval mode to an ONNX file with the same outputs.

    Quantized weights are stored as integers, int4 for 4 bits and int8 otherwise; the quantizer is
    recognised from the weights. Before the file is moved to `path`, ONNX Runtime runs it on
    `example`, on one more sample if the batch is dynamic, and on the example cut to half along the
    other dynamic dimensions. The outputs are compared with those of PyTorch. After an error, an
    earlier file at `path` is unchanged.

    Args:
        model: Compressed model in float32.
        path: Path of the file.
        example: Real inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            Arguments that are not tensors are fixed in the file.
        operator: Operator that the model was compressed with, or its text; it is stored in the
            file. If it quantizes, every weight must be what it makes.
        weights: Weights that were compressed; by default all `compressible_weights(model)`.
        dynamic_batch: Whether the batch size, the first dimension of every input, is dynamic.
        dynamic_dims: Other dynamic dimensions of each input, such as
            `[{1: torch.export.Dim("tokens", max=384)}]`.
        input_names: Names of the inputs, in the order of `example`; by default those of the
            arguments.
        output_names: Names of the outputs, in the order in which they are returned; by default the
            keys or fields of the model's output, "output" for a single tensor, or "output_0" and so
            on for a tuple.
        metadata: Metadata to keep in the file, such as the mean and the standard deviation that
            inputs are normalised by. Values that are no texts are written as JSON.

    Raises:
        ImportError: If a package that the export needs is missing.
        ValueError: If an input, a weight or an operation cannot be exported, or the outputs differ.
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
        importlib.import_module(package)  # a missing package is reported before the work begins
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
        store_integers(program.model, stored)
        optimize(program)
        remove_metadata(program.model)
        name_outputs(program.model, names)
        if operator is not None:
            program.model.metadata_props["torchcram.operator"] = str(operator)
        for key, value in (metadata or {}).items():
            text = value if isinstance(value, str) else json.dumps(value)
            program.model.metadata_props[f"torchcram.{key}"] = text
        _check_size(program)
        with written_aside(Path(path)) as aside:
            program.save(aside)
            check_file(aside, model, _batches(inputs, dims, dynamic_batch))


def _without_pruners(operator: Operator | str | None) -> Operator | None:
    """Returns an operator; its pruners are not needed here."""
    if isinstance(operator, str):
        return parse_without_pruners(operator)
    return None if operator is None else as_operator(operator)


def _stored(model: nn.Module, operator: Operator | None, weights: Weights | None) -> list[Stored]:
    """Returns the integers of every quantized weight, with all its names if it is tied."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    known = quantizer_of(operator)
    chosen = layer_weights(model) if weights is None else weights_in(model, weights)
    stored = []
    for name, weight in chosen.items():
        quantize = known or find_quantizer(chosen, name)
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
            # inputs share the batch or token dimension
            warnings.filterwarnings("ignore", "# The axis name: .* will not be used")
            # caused by the exporter itself for recurrent layers
            warnings.filterwarnings("ignore", "_check_is_size will be removed")
            warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights")
            # with constants among the arguments the exporter names dynamic dimensions
            warnings.filterwarnings("ignore", "# ONNX model has different number of inputs")
            program = torch.onnx.export(
                model,
                example.args,
                kwargs=example.kwargs,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=shapes,
                input_names=input_names,
                optimize=False,  # it would fold weights that are to become integers
                verbose=False,
            )
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be exported: {_reason(error)}") from error
    assert program is not None  # noqa: S101
    return program


def _output_names(
    program: ONNXProgram, returned: object, requested: Sequence[str] | None
) -> list[str]:
    """Returns the names of the outputs: those requested, or those from the model's output."""
    count = len(program.model.graph.outputs)
    if requested is not None:
        if len(requested) != count:
            raise ValueError(f"output_names must have {count} names, got {list(requested)}")
        return list(requested)
    names = _names_in(returned, "output", outermost=True)
    if len(names) != count:  # outputs in a container of an unknown type
        names = [f"output_{index}" for index in range(count)]
    return unused_names(program.model, names)


def _names_in(returned: object, name: str, *, outermost: bool = False) -> list[str]:
    """Returns names for the tensors in a model's output, in order."""
    if isinstance(returned, Tensor):
        return [name]
    if isinstance(returned, Mapping):
        inner = [(str(key), value) for key, value in returned.items()]
    elif isinstance(returned, tuple) and (fields := getattr(returned, "__match_args__", ())):
        inner = list(zip(fields, returned, strict=True))  # named tuples, including those of torch
    elif isinstance(returned, (tuple, list)):
        return [
            nested
            for index, value in enumerate(returned)
            for nested in _names_in(value, f"{name}_{index}")
        ]
    else:
        return []
    prefix = "" if outermost else f"{name}_"
    return [nested for key, value in inner for nested in _names_in(value, f"{prefix}{key}")]


def _reason(error: Exception) -> str:
    """Returns the error message of the exporter without its advice for developers."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    summary = text.split("## Exception summary", 1)[-1]
    return summary.split("(Refer to the full stack trace", 1)[0].strip()


def _on_cpu(model: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """Returns the model, copied if necessary, and the example on the CPU."""
    if any(value.device.type != "cpu" for value in model.state_dict().values()):
        model = copy.deepcopy(model).cpu()
    return model, example.each(lambda value: value.detach().cpu())


def _two_samples(example: Example, dynamic_batch: bool) -> Example:
    """Returns an example of at least two samples: torch.export makes a batch size of 1 constant."""
    if dynamic_batch and example.shapes[0][0] == 1:
        return example.each(lambda value: torch.cat([value, value]))
    return example


def _shapes(
    example: Example, dims: Sequence[Mapping[int, Dim]], dynamic_batch: bool
) -> dict[str, Any] | tuple[Any, ...] | None:
    """Returns the dynamic dimensions of every argument, or None if there are none."""
    batch = {0: torch.export.Dim("batch")} if dynamic_batch else {}
    shapes = [{**batch, **some} for some in dims]
    return example.for_each_tensor(shapes) if any(shapes) else None


def _batches(
    example: Example, dims: Sequence[Mapping[int, Dim]], dynamic_batch: bool
) -> list[Example]:
    """Returns inputs to check: the example, one more sample, and half of other dynamic sizes."""
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
        raise ValueError(f"the weights take {size / 2**30:.1f} GiB, but an ONNX file holds 2 GiB")


# Inputs


@dataclass(frozen=True)
class Example:
    """Arguments that a model is called with: a tensor, a tuple, or keyword arguments.

    Attributes:
        values: Tensors and constants by the name or the position of the argument, in order.
        named: Whether they are keyword arguments.
    """

    values: Mapping[Any, object]
    named: bool

    @classmethod
    def of(cls, given: object) -> Example:
        """Returns an example from the inputs that `torchcram.runtime.prepare` accepts.

        Raises:
            ValueError: If there is no tensor, or an argument of a type that is not allowed.
        """
        if isinstance(given, Mapping):
            values = dict(given)
        elif isinstance(given, (Tensor, tuple)):
            values = dict(enumerate(given if isinstance(given, tuple) else (given,)))
        else:
            raise ValueError(
                "example must be a tensor, a tuple of arguments or a mapping of keyword arguments, "
                f"got {type(given).__name__}"
            )
        named = isinstance(given, Mapping)
        for key, value in values.items():
            if named and not isinstance(key, str):
                raise ValueError(f"keys of example must be names of arguments, got {key!r}")
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise ValueError(
                    f"example[{key!r}] must be a tensor, or None, bool, int, float or str, which "
                    f"are fixed in the file, got {type(value).__name__}"
                )
        if not any(isinstance(value, Tensor) for value in values.values()):
            raise ValueError("example must have at least one tensor, got none")
        return cls(values, named)

    @property
    def tensors(self) -> dict[Any, Tensor]:
        """Inputs of the file, in order."""
        return {key: value for key, value in self.values.items() if isinstance(value, Tensor)}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs."""
        return [tuple(value.shape) for value in self.tensors.values()]

    @property
    def args(self) -> tuple[object, ...]:
        """Positional arguments."""
        return () if self.named else tuple(self.values.values())

    @property
    def kwargs(self) -> dict[str, object]:
        """Keyword arguments."""
        return dict(self.values) if self.named else {}

    def each(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Returns the example with a function applied to every tensor."""
        return self.with_tensors([change(value) for value in self.tensors.values()])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Example:
        """Returns the example with other tensors in place of its own, in order."""
        return replace(
            self, values={**self.values, **dict(zip(self.tensors, tensors, strict=True))}
        )

    def for_each_tensor(self, values: Sequence[Any]) -> dict[str, Any] | tuple[Any, ...]:
        """Returns the arguments with other values for the tensors and None for the constants."""
        known = dict(zip(self.tensors, values, strict=True))
        every = {key: known.get(key) for key in self.values}
        return every if self.named else tuple(every.values())

    def run(self, model: nn.Module) -> object:
        """Calls a model with the arguments and returns its output."""
        return model(*self.args, **self.kwargs)


# Checks


def check_example(example: Example, dynamic_batch: bool, input_names: Sequence[str] | None) -> None:
    """Checks the batch dimension of the inputs and the number of names.

    Raises:
        ValueError: If a dynamic batch is not the first dimension of every input, or the number of
            names is wrong.
    """
    shapes = example.shapes
    sizes = {shape[:1] for shape in shapes}
    if dynamic_batch and (len(sizes) > 1 or sizes & {(), (0,)}):
        raise ValueError(
            f"inputs of shapes {shapes} have no batch dimension in common, which must be the first "
            "of each; dynamic_batch=False fixes all sizes"
        )
    if input_names is not None and len(input_names) != len(shapes):
        raise ValueError(f"input_names must have {len(shapes)} names, got {list(input_names)}")


def check_dims(example: Example, dynamic_dims: Sequence[Mapping[int, object]] | None) -> None:
    """Checks the dynamic dimensions of the inputs.

    Raises:
        ValueError: If an input does not have a dimension, or it is the batch or has size 1.
    """
    if dynamic_dims is None:
        return
    shapes = example.shapes
    if len(dynamic_dims) != len(shapes):
        raise ValueError(f"dynamic_dims must have {len(shapes)} entries, got {len(dynamic_dims)}")
    for index, (shape, some) in enumerate(zip(shapes, dynamic_dims, strict=True)):
        for dim in some:
            if not 1 <= dim < len(shape) or shape[dim] < 2:
                raise ValueError(
                    f"dynamic_dims[{index}] must name dimensions from 1 on, of size 2 or more, got "
                    f"{dim!r} for an input of shape {shape}"
                )


def check_dtypes(model: nn.Module) -> None:
    """Checks that all floating-point tensors of a model are float32.

    Raises:
        ValueError: If one is not.
    """
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32:
            raise ValueError(
                f"{name!r} is {value.dtype}: only float32 can be exported. To quantize as well, "
                "call model.float() first, then compress"
            )


def check_file(path: Path, model: nn.Module, batches: Sequence[Example]) -> None:
    """Compares the outputs of a file in ONNX Runtime on the CPU with those of PyTorch.

    Args:
        path: Path of the file.
        model: Model on the CPU, in eval mode.
        batches: Inputs of several sizes.

    Raises:
        ValueError: If the file does not run, or an output differs.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"ONNX Runtime cannot run the model: {error}") from error
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]
    for batch in batches:
        expected = [leaf for leaf in tree_leaves(batch.run(model)) if isinstance(leaf, Tensor)]
        tensors = batch.tensors
        keys = (
            inputs if set(inputs) == set(tensors) else list(tensors)
        )  # otherwise the inputs are renamed
        feed = {name: tensors[key].numpy() for name, key in zip(inputs, keys, strict=True)}
        where = f"on inputs of {' and '.join(map(str, batch.shapes))}"
        try:
            actual = session.run(None, feed)
        except Exception as error:
            raise ValueError(f"ONNX Runtime fails {where}: {error}") from error
        if len(actual) != len(expected):
            raise ValueError(f"ONNX Runtime has {len(actual)} outputs, PyTorch {len(expected)}")
        for name, ours, theirs in zip(outputs, expected, actual, strict=True):
            difference = compare(ours, torch.as_tensor(theirs))
            if difference is not None:
                raise ValueError(f"output {name!r} differs {where}: {difference}")


def compare(expected: Tensor, actual: Tensor) -> str | None:
    """Returns the difference of two outputs in words, or None if it is within the tolerance.

    Infinite and NaN values and integers must be equal.

    Args:
        expected: Output of PyTorch.
        actual: Output of ONNX Runtime.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        shapes = f"{tuple(actual.shape)} of {actual.dtype} in ONNX Runtime"
        return f"{shapes}, {tuple(expected.shape)} of {expected.dtype} in PyTorch"
    error, largest = tensor_error(expected, actual)
    allowed = TOLERANCE * largest
    if error <= allowed:
        return None
    if not expected.is_floating_point():
        return f"{int((actual != expected).sum())} of {expected.numel()} values"
    return f"by {error:.3g} where {allowed:.3g} is allowed"
