"""Whether a model can be exported, and whether the file gives what the model gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchcram.runtime.outputs import tensor_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from torchcram.runtime.onnx.example import Example

TOLERANCE = 1e-4  # of the largest finite magnitude of an output


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


def check(path: Path, model: nn.Module, batches: Sequence[Example]) -> None:
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
    inputs = [one.name for one in session.get_inputs()]
    outputs = [one.name for one in session.get_outputs()]
    for batch in batches:
        expected = [one for one in tree_leaves(batch.run(model)) if isinstance(one, Tensor)]
        tensors = batch.tensors
        keys = inputs if set(inputs) == set(tensors) else list(tensors)  # else they are renamed
        given = {name: tensors[key].numpy() for name, key in zip(inputs, keys, strict=True)}
        where = f"on inputs of {' and '.join(map(str, batch.shapes))}"
        try:
            found = session.run(None, given)
        except Exception as error:
            raise ValueError(f"ONNX Runtime fails {where}: {error}") from error
        if len(found) != len(expected):
            raise ValueError(f"ONNX has {len(found)} outputs, PyTorch {len(expected)}")
        for name, ours, theirs in zip(outputs, expected, found, strict=True):
            difference = compare(ours, torch.as_tensor(theirs))
            if difference is not None:
                raise ValueError(f"output {name!r} differs {where}: {difference}")


def compare(expected: Tensor, found: Tensor) -> str | None:
    """Returns what is different, None where it is within the tolerance.

    Infinite values are to be in the same places. What is not a float is to be equal.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        shapes = f"{tuple(found.shape)} of {found.dtype} in ONNX Runtime"
        return f"{shapes}, {tuple(expected.shape)} of {expected.dtype} in PyTorch"
    error, largest = tensor_error(expected, found)
    allowed = TOLERANCE * largest
    if error <= allowed:
        return None
    if not expected.is_floating_point():
        return f"{int((found != expected).sum())} of {expected.numel()} values"
    return f"by {error:.3g} where {allowed:.3g} is allowed"
