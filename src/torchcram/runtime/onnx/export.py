"""Compressed models as ONNX files, checked in ONNX Runtime before they are put in place.

Zeros are in the weights. Quantized weights are int8 or int4 with a DequantizeLinear behind them, so
that the file is as small as they are. Needs `pip install "torchcram[export]"`.
"""

from __future__ import annotations

import copy
import importlib
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
from torchcram.passes import eval_mode
from torchcram.runtime.integers import (
    find_integers,
    find_quantizer,
    quantizer_of,
    stored_bits,
)
from torchcram.runtime.onnx.graph import (
    Stored,
    free_names,
    name_outputs,
    optimize,
    put_integers,
    strip,
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

OPSET = 21  # the first with int4 and with one scale per block
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # of the largest finite magnitude of an output
CONSTANTS = (type(None), bool, int, float, str)
"""Types of arguments that are no inputs of the file: their values are fixed in it."""
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
            check_file(aside, model, _batches(inputs, dims, dynamic_batch))


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


def _output_names(
    program: ONNXProgram, returned: object, requested: Sequence[str] | None
) -> list[str]:
    """Returns the names of the outputs: those requested, or those that the model has for them."""
    count = len(program.model.graph.outputs)
    if requested is not None:
        if len(requested) != count:
            raise ValueError(f"{count} outputs, but the output_names are {list(requested)}")
        return list(requested)
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
            nested
            for index, value in enumerate(returned)
            for nested in _names_in(value, f"{name}_{index}")
        ]
    else:
        return []
    prefix = "" if outermost else f"{name}_"
    return [nested for key, value in inner for nested in _names_in(value, f"{prefix}{key}")]


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


# Inputs


@dataclass(frozen=True)
class Example:
    """What a model is called with.

    Attributes:
        values: Tensors and constants, by the name of the argument or, in order, by its position.
        named: Whether they are keyword arguments.
    """

    values: Mapping[Any, object]
    named: bool

    @classmethod
    def of(cls, given: object) -> Example:
        """Reads an example as `torchcram.runtime.prepare` takes it.

        Raises:
            ValueError: saying what was given and what is allowed.
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
                raise ValueError(f"example has the key {key!r}, which is no name of an argument")
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise ValueError(
                    f"example[{key!r}] is {type(value).__name__}; allowed are tensors, and None, "
                    "bool, int, float and str, which are fixed in the file"
                )
        if not any(isinstance(value, Tensor) for value in values.values()):
            raise ValueError("example is empty: one tensor for each input is needed")
        return cls(values, named)

    @property
    def tensors(self) -> dict[Any, Tensor]:
        """The inputs of the file, in order."""
        return {key: value for key, value in self.values.items() if isinstance(value, Tensor)}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs."""
        return [tuple(value.shape) for value in self.tensors.values()]

    @property
    def args(self) -> tuple[object, ...]:
        """The arguments by position."""
        return () if self.named else tuple(self.values.values())

    @property
    def kwargs(self) -> dict[str, object]:
        """The arguments by name."""
        return dict(self.values) if self.named else {}

    def each(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Returns the example with every tensor changed."""
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
        """Calls a model with it."""
        return model(*self.args, **self.kwargs)


# Checks


def check_example(example: Example, dynamic_batch: bool, input_names: Sequence[str] | None) -> None:
    """Refuses inputs without a first dimension in common, and names that are not one for each."""
    shapes = example.shapes
    sizes = {shape[:1] for shape in shapes}
    if dynamic_batch and (len(sizes) > 1 or sizes & {(), (0,)}):
        raise ValueError(
            f"inputs of shapes {shapes} have no batch dimension in common, the first of each; "
            "dynamic_batch=False fixes all of them"
        )
    if input_names is not None and len(input_names) != len(shapes):
        raise ValueError(f"{len(shapes)} inputs, but the input_names are {list(input_names)}")


def check_dims(example: Example, dynamic_dims: Sequence[Mapping[int, object]] | None) -> None:
    """Refuses dimensions that inputs do not have, the batch, and those of size 1."""
    if dynamic_dims is None:
        return
    shapes = example.shapes
    if len(dynamic_dims) != len(shapes):
        raise ValueError(f"{len(shapes)} inputs, but dynamic_dims has {len(dynamic_dims)} entries")
    for index, (shape, some) in enumerate(zip(shapes, dynamic_dims, strict=True)):
        for dim in some:
            if not 1 <= dim < len(shape) or shape[dim] < 2:
                raise ValueError(
                    f"dynamic_dims[{index}] has dimension {dim!r} of an input of shape "
                    f"{shape}; allowed: from 1 on, of size 2 or more"
                )


def check_dtypes(model: nn.Module) -> None:
    """Refuses a model with floats other than float32, by name."""
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float32:
            raise ValueError(
                f"{name!r} is {value.dtype}: only float32 can be exported. To quantize as well, "
                "convert by model.float() first, then compress"
            )


def check_file(path: Path, model: nn.Module, batches: Sequence[Example]) -> None:
    """Compares ONNX Runtime on the CPU with PyTorch.

    Args:
        path: Path of the file.
        model: Model on the CPU, in eval mode.
        batches: Inputs of several sizes.

    Raises:
        ValueError: naming the output and the batch that differ, or what cannot be run.
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
        keys = inputs if set(inputs) == set(tensors) else list(tensors)  # else they are renamed
        feed = {name: tensors[key].numpy() for name, key in zip(inputs, keys, strict=True)}
        where = f"on inputs of {' and '.join(map(str, batch.shapes))}"
        try:
            actual = session.run(None, feed)
        except Exception as error:
            raise ValueError(f"ONNX Runtime fails {where}: {error}") from error
        if len(actual) != len(expected):
            raise ValueError(f"ONNX has {len(actual)} outputs, PyTorch {len(expected)}")
        for name, ours, theirs in zip(outputs, expected, actual, strict=True):
            difference = compare(ours, torch.as_tensor(theirs))
            if difference is not None:
                raise ValueError(f"output {name!r} differs {where}: {difference}")


def compare(expected: Tensor, actual: Tensor) -> str | None:
    """Returns what is different, None where it is within the tolerance.

    Infinite values are to be in the same places. What is not a float is to be equal.
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
