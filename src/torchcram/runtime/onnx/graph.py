"""Changes to an exported graph: integers for weights, and nothing in it that is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import onnx_ir as ir
    from torch.onnx import ONNXProgram

    from torchcram.runtime.integers import Integers


class Stored(NamedTuple):
    """A weight that is to be stored as integers.

    Attributes:
        names: all that the weight has in the model.
        integers: what it is made of.
        bits: to store an integer in, 4 or 8.
    """

    names: frozenset[str]
    integers: Integers
    bits: int


def put_integers(model: ir.Model, weights: Iterable[Stored]) -> None:
    """Replaces weights by integers with a DequantizeLinear behind them.

    What a Linear layer multiplies by is stored as it is needed there, transposed, with a first
    dimension of 1. ONNX Runtime would otherwise make one MatMulNBits of DequantizeLinear and
    MatMul, which rounds the inputs of the layer to 8 bits, too. So is what has its inputs before
    its outputs already, the Conv1D of Transformers.

    Args:
        model: as exported; changed in place. A weight that it does not use is passed over.
        weights: what to replace.
    """
    graph = model.graph
    for weight in weights:
        for name in sorted(weight.names & set(graph.initializers)):
            value = graph.initializers[name]
            products = list(_products(value))
            if products:
                turned = weight.integers.transposed().in_a_batch()
                factor = _dequantize(graph, f"{name}.transposed", turned, weight.bits)
                for product in products:
                    product.replace_input_with(1, factor)
            _remove_unused(graph, value)
            if value.uses():
                batched = any(_multiplies(node, index) for node, index in value.uses())
                integers = weight.integers.in_a_batch() if batched else weight.integers
                whole = _dequantize(graph, name, integers, weight.bits)
                value.replace_all_uses_with(_squeezed(graph, whole) if batched else whole)
            del graph.initializers[name]


def optimize(program: ONNXProgram) -> None:
    """Simplifies an exported graph; inputs keep their names, also one that is an output."""
    inputs = program.model.graph.inputs
    names = [value.name for value in inputs]
    program.optimize()
    for value, name in zip(inputs, names, strict=True):
        value.name = name


def name_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Gives the outputs of a graph names, whatever else in it has them.

    Args:
        model: Exported model, changed in place.
        names: Name of each output, in order.

    Raises:
        ValueError: for a name that is given twice or to an input or a weight.
    """
    graph = model.graph
    taken = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    for index, name in enumerate(names):
        if name in taken or name in names[:index]:
            raise ValueError(
                f"output_names has {name!r}, which another output, an input or a weight is called"
            )
    outputs = [_own_value(graph, index) for index in range(len(graph.outputs))]
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in names:
                value.name = f"{value.name}.inner"
    for value, name in zip(outputs, names, strict=True):
        value.name = name


def free_names(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Returns names for outputs, changed where an input or a weight is called so already."""
    graph = model.graph
    taken = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    free = []
    for name in names:
        while name in taken:
            name = f"{name}_output"
        taken.add(name)
        free.append(name)
    return free


def strip(model: ir.Model) -> None:
    """Drops notes of the exporter, stack traces with paths of this machine among them."""
    graph = model.graph
    model.metadata_props.clear()
    graph.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()


def _own_value(graph: ir.Graph, index: int) -> ir.Value:
    """Returns the value of an output, one of its own where it is also something else."""
    import onnx_ir as ir

    value = graph.outputs[index]
    if value.producer() is not None and not any(value is other for other in graph.outputs[:index]):
        return value
    node = ir.node("Identity", [value])
    (copied,) = node.outputs
    copied.type, copied.shape = value.type, value.shape
    graph.append(node)
    graph.outputs[index] = copied
    return copied


def _products(weight: ir.Value) -> Iterator[ir.Node]:
    """The products by the transposed weight of inputs with more than two dimensions."""
    for transpose in weight.consumers():
        if not _transposes(transpose):
            continue
        for node, index in transpose.outputs[0].uses():
            left = node.inputs[0]
            if node.op_type != "MatMul" or index != 1 or left is None or left.shape is None:
                continue
            if len(left.shape) > 2:
                yield node


def _multiplies(node: ir.Node, index: int) -> bool:
    """Returns whether a node multiplies by its input of that index as it is."""
    turned = node.attributes.get("transB")
    plain = turned is None or not turned.as_int()
    return index == 1 and node.op_type in ("MatMul", "Gemm") and plain


def _squeezed(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Returns a value without its first dimension of 1."""
    import onnx_ir as ir

    axes = ir.node("Constant", [], {"value_ints": [0]}, name=f"{value.name}.axes")
    node = ir.node("Squeeze", [value, axes.outputs[0]], name=f"{value.name}.squeeze")
    (squeezed,) = node.outputs
    squeezed.name, squeezed.dtype = f"{value.name}.matrix", value.dtype
    assert value.shape is not None  # noqa: S101
    squeezed.shape = ir.Shape(value.shape[1:])
    producer = value.producer()
    assert producer is not None  # noqa: S101
    graph.insert_after(producer, [axes, node])
    return squeezed


def _transposes(node: ir.Node) -> bool:
    perm = node.attributes.get("perm")
    return node.op_type == "Transpose" and perm is not None and list(perm.as_ints()) == [1, 0]


def _remove_unused(graph: ir.Graph, value: ir.Value) -> None:
    for node in list(value.consumers()):
        if _transposes(node) and not node.outputs[0].uses():
            graph.remove(node, safe=True)


def _dequantize(graph: ir.Graph, name: str, weight: Integers, bits: int) -> ir.Value:
    import ml_dtypes
    import onnx_ir as ir

    integers = weight.values.detach().cpu().contiguous().numpy()
    if bits == 4:
        integers = integers.astype(ml_dtypes.int4)
    scale = weight.scale.detach().cpu().contiguous().numpy()
    inputs = []
    for key, array in ((f"{name}.integers", integers), (f"{name}.scale", scale)):
        tensor = ir.tensor(array, name=key)
        kind, shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
        graph.initializers[key] = ir.Value(name=key, type=kind, shape=shape, const_value=tensor)
        inputs.append(graph.initializers[key])
    settings = {"axis": weight.axis} | ({"block_size": weight.block} if weight.block else {})
    node = ir.node("DequantizeLinear", inputs, settings, name=f"{name}.dequantize")
    (value,) = node.outputs
    value.name, value.dtype = f"{name}.value", ir.DataType.FLOAT
    value.shape = ir.Shape(integers.shape)
    graph.insert_before(graph[0], node)
    return value
