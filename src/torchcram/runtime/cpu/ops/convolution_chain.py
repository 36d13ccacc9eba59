"""A chain of convolutions by panels of images, computed a few rows at a time.

The activations of 16 large images do not stay in the caches. So that a layer finds the outputs of
the layer before it there, the chain does not compute one layer after another, but some rows of each
in turn. Rows that no layer needs any more are overwritten.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.activation_memory import empty_activations
from torchcram.runtime.cpu.chain_plan import (
    NO_RESIDUAL,
    ChainLayer,
    ChainPlan,
    chain_layers,
    plan_chain,
)
from torchcram.runtime.cpu.memory_format import (
    IMAGES_INNERMOST,
    empty_images,
    output_dim_order,
)
from torchcram.runtime.cpu.ops.common import (
    pointer,
    register,
    register_vmap,
    require_floats,
    require_rows,
)
from torchcram.runtime.cpu.packing import check_packed, convolution_struct, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FLOAT_BYTES = 4


def ring_floats(layers: tuple[ChainLayer, ...], size: tuple[int, int], rows: int) -> list[int]:
    """Returns the numbers of values of one image that each layer but the last keeps in memory."""
    _, sizes, rings = plan_chain(layers, size, rows)
    return [
        layer.features * ring * columns
        for layer, ring, (_, columns) in zip(layers[:-1], rings[1:], sizes[1:], strict=False)
    ]


def _convolution_chain(
    x: Tensor,
    packed: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    numbers: list[int],
    rows: int,
) -> Tensor:
    layers = _checked(x, packed, biases, numbers, rows)
    plan = _plan(x, layers, rows)
    if plan is None:
        y = _layer_by_layer(x, packed, biases, numbers, rows)
        output = _empty_output(x.new_empty, x, y)
        return y if y.stride() == output.stride() else output.copy_(y)
    batch, channels = x.shape[:2]
    steps, sizes, rings = plan
    y = empty_images(empty_activations, (batch, layers[-1].features, *sizes[-1]), IMAGES_INNERMOST)
    floats = [batch * count for count in ring_floats(layers, sizes[0], rows)]
    memory = empty_activations((sum(floats),))
    starts = [sum(floats[:i]) * _FLOAT_BYTES for i in range(len(floats))]
    values = [x.data_ptr(), *(memory.data_ptr() + start for start in starts), y.data_ptr()]
    features = [channels, *(layer.features for layer in layers)]
    shapes = [
        convolution_struct(
            *(layer.geometry, batch, features[layer.source]),
            *(sizes[layer.source], sizes[layer.source]),
        )
        for layer in layers
    ]
    described: list[int] = []  # the fields of ChainLayer in packed.h
    for number, layer in enumerate(layers):
        source, residual = layer.source, layer.residual
        described += [
            *(ctypes.addressof(shapes[number]), packed[number].data_ptr(), packed[number].numel()),
            *(layer.features, pointer(biases[number]) or 0, int(layer.relu)),
            *(values[source], rings[source]),
            *((0, 1) if residual == NO_RESIDUAL else (values[residual], rings[residual])),
            *(values[number + 1], rings[number + 1]),
        ]
    order = [number for step in steps for number in step]
    computed = kernels().torchcram_chain(
        *((ctypes.c_int64 * len(described))(*described), len(layers)),
        *((ctypes.c_int64 * len(order))(*order), len(steps)),
        torch.get_num_threads(),
    )
    if not computed:
        for matrix in packed:
            check_packed(matrix)  # raises if it was overwritten without torch noticing
        raise ValueError(f"the packed matrices do not hold {layers} from {channels} channels")
    return y


def _plan(x: Tensor, layers: tuple[ChainLayer, ...], rows: int) -> ChainPlan | None:
    """Returns how a chain runs, or None if its layers have to run one after another."""
    innermost = output_dim_order(x, by_images=True, channels_last=False) == IMAGES_INNERMOST
    if not innermost or not len(x):
        return None
    try:
        return plan_chain(layers, (x.shape[2], x.shape[3]), rows)
    except ValueError:  # such as a residual that has to be expanded, which its layer does
        return None


def _empty_output(empty: Callable[[tuple[int, ...]], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Returns an uninitialized output for the input `x`, of the shape of `y`."""
    dim_order = output_dim_order(x, by_images=True, channels_last=False)
    return empty_images(empty, tuple(y.shape), dim_order)


def _checked(
    x: Tensor,
    packed: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    numbers: list[int],
    rows: int,
) -> tuple[ChainLayer, ...]:
    require_floats(x)
    layers = chain_layers(numbers)
    if not len(layers) == len(packed) == len(biases) or rows < 1 or x.dim() != 4:
        raise ValueError(
            f"a chain of {len(layers)} layers got {len(packed)} matrices, {len(biases)} biases, "
            f"inputs of shape {tuple(x.shape)} and {rows} rows at a time"
        )
    channels = [x.shape[1], *(layer.features for layer in layers)]
    for number, layer in enumerate(layers):
        if rows_of(packed[number]) != layer.features:
            raise ValueError(f"matrix {number} of a chain does not have {layer.features} rows")
        if layer.residual != NO_RESIDUAL and channels[layer.residual] != layer.features:
            raise ValueError(
                f"the residual of layer {number} has {channels[layer.residual]} channels"
            )
        require_rows("bias", biases[number], layer.features)
    return layers


def _layer_by_layer(
    x: Tensor, packed: Sequence[Tensor], biases: Sequence[Tensor | None], numbers: list[int], _: int
) -> Tensor:
    """Runs one layer after another, with all their rows."""
    values = [x]
    for layer, matrix, bias in zip(chain_layers(numbers), packed, biases, strict=True):
        residual = None if layer.residual == NO_RESIDUAL else values[layer.residual]
        values.append(
            torch.ops.torchcram.sparse_conv2d(
                *(values[layer.source], matrix, bias, residual, layer.features),
                *(layer.numbers()[4:], True, layer.relu),
            )
        )
    return values[-1]


def _fake_convolution_chain(
    x: Tensor,
    packed: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    numbers: list[int],
    rows: int,
) -> Tensor:
    y = _layer_by_layer(x, packed, biases, numbers, rows)
    return _empty_output(x.new_empty, x, y)


def _vmap_convolution_chain(
    _: object, in_dims: tuple[object, ...], x: Tensor, *others: object
) -> tuple[Tensor, int]:
    """Runs a batch of batches of images as one batch."""
    dims = [
        dim
        for each in in_dims[1:]
        for dim in (each if isinstance(each, (list, tuple)) else (each,))
        if dim is not None
    ]
    if dims or not isinstance(in_dims[0], int):
        raise NotImplementedError("vmap over the weights of a chain of convolutions")
    x = x.movedim(in_dims[0], 0)
    y: Tensor = torch.ops.torchcram.convolution_chain(x.flatten(0, 1), *others)
    return y.unflatten(0, x.shape[:2]), 0


register(
    "convolution_chain(Tensor x, Tensor[] packed, Tensor?[] biases, int[] layers, int rows) "
    "-> Tensor",
    _convolution_chain,
    fake=_fake_convolution_chain,
    dense=_layer_by_layer,
)
register_vmap("convolution_chain", _vmap_convolution_chain)
