"""Changes to an exported ONNX graph: integers for weights, names of outputs, no metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import onnx_ir as ir
    from torch.onnx import ONNXProgram

    from torchcram.runtime.integers import Integers


class Stored(NamedTuple):
    """A weight that is stored as integers.

    Attributes:
        names: Names of the weight in the model; several if it is tied.
        integers: Integers and scales of the weight.
        bits: Number of bits of a stored integer, 4 or 8.
    """

    names: frozenset[str]
    integers: Integers
    bits: int


def store_integers(model: ir.Model, weights: Iterable[Stored]) -> None:
    """Replaces weights by integers that DequantizeLinear turns into floats.

    The weight of a Linear layer is stored transposed, as MatMul needs it, with a first dimension of
    1. Without that dimension ONNX Runtime would fuse DequantizeLinear and MatMul to MatMulNBits,
    which rounds the inputs of the layer to 8 bits, too. The Conv1D of Transformers, whose weight is
    transposed already, gets the same dimension.

    Args:
        model: Exported model, changed in place. Weights that it does not use are skipped.
        weights: Weights to replace.
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
    """Simplifies an exported graph; inputs keep their names, even if they are outputs."""
    inputs = program.model.graph.inputs
    names = [value.name for value in inputs]
    program.optimize()
    for value, name in zip(inputs, names, strict=True):
        value.name = name


def name_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Names the outputs of a graph; other values with these names are renamed.

    Args:
        model: Exported model, changed in place.
        names: Name of each output, in order.

    Raises:
        ValueError: If a name appears twice, or belongs to an input or a weight.
    """
    graph = model.graph
    taken = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    for index, name in enumerate(names):
        if name in taken or name in names[:index]:
            raise ValueError(
                f"output_names has {name!r}, which is also the name of another output, an input or "
                "a weight"
            )
    outputs = [_own_value(graph, index) for index in range(len(graph.outputs))]
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in names:
                value.name = f"{value.name}.inner"
    for value, name in zip(outputs, names, strict=True):
        value.name = name


def unused_names(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Returns names for outputs, changed if an input or a weight has the same name."""
    graph = model.graph
    taken = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    free = []
    for name in names:
        while name in taken:
            name = f"{name}_output"
        taken.add(name)
        free.append(name)
    return free


def remove_metadata(model: ir.Model) -> None:
    """Removes the metadata of the exporter, which includes stack traces with local paths."""
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
    """Returns the value of an output; a copy if it is also an input, a weight or another output."""
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
    """Yields the products of the transposed weight with inputs of more than two dimensions."""
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
    """Returns whether a node multiplies by its input at this index without transposing it."""
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
