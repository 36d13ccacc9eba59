"""The CPU kernels as operators of torch, which torch.compile and torch.export can handle.

They are registered as `torch.ops.torchcram`; the modules in `torchcram.runtime.cpu.modules` call
them.

    sparse_linear             a Linear layer
    sparse_feed_forward       two Linear layers with an activation between them
    sparse_linear_int8        a Linear layer in 8 bits
    sparse_feed_forward_int8  two Linear layers in 8 bits with an activation between them
    sparse_conv2d             a convolution
    attention                 self-attention without a mask

The kernels have no derivatives. If one is needed, for `backward`, in forward mode or in a transform
of `torch.func`, an operator unpacks the weight and computes with torch.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.packing import Geometry, check_packed, convolution_struct, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset

operators = torch.library.Library("torchcram", "FRAGMENT")


def register(
    name: str,
    kernel: Callable[..., Tensor],
    *,
    shape: Callable[..., Tensor],
    dense: Callable[..., Tensor],
) -> None:
    """Registers the implementations of an operator that has been defined.

    Args:
        name: Name of the operator.
        kernel: Function that computes it on the CPU.
        shape: Function that returns an empty output, for tensors without data.
        dense: Function that computes the same with differentiable operators of torch, or raises an
            error that explains why there is no derivative.
    """
    operators.impl(name, kernel, "CPU")
    torch.library.register_fake(f"torchcram::{name}", shape, lib=operators)
    overload = getattr(torch.ops.torchcram, name).default

    def differentiable(keys: torch._C.DispatchKeySet, *arguments: object) -> Tensor:
        if _differentiated(arguments):
            return dense(*arguments)
        if (keys & _BELOW_AUTOGRAD).highestPriorityTypeId() == torch._C.DispatchKey.CPU:
            return kernel(*arguments)  # the dispatcher would call it, too, but more slowly
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = overload(*arguments)
        return y

    operators.impl(name, differentiable, "Autograd", with_keyset=True)


def _differentiated(arguments: tuple[object, ...]) -> bool:
    """Returns whether a derivative with respect to one of the arguments may be needed."""
    forward_mode = forward_ad._current_level >= 0
    if not forward_mode and not torch.is_grad_enabled():
        return False
    return any(
        each.requires_grad or (forward_mode and forward_ad.unpack_dual(each).tangent is not None)
        for each in arguments
        if isinstance(each, Tensor)
    )


def run_on_tokens(
    run: Callable[[int, int, int, int | None, int], int],
    matrices: tuple[Tensor, ...],
    x: Tensor,
    residual: Tensor | None,
    *,
    features: int,
    rows: int,
) -> Tensor:
    """Runs a kernel that maps the last dimension of `x` to another number of features.

    Args:
        run: Kernel. It is called with the address of the inputs, the number of tokens and of input
            features, and the addresses of the residual and of the outputs. It returns 0 if the
            packed matrix has another shape.
        matrices: Packed matrices that the kernel uses.
        x: Inputs (..., features).
        residual: Tensor that is added to the outputs, or None.
        features: Number of output features.
        rows: Number of rows of the last matrix.

    Raises:
        ValueError: If the packed matrix, the inputs and the residual do not fit together.
    """
    _require_tokens(x)
    x = x.contiguous()
    inner = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], features))
    residual = None if residual is None else expand_residual(y, residual).contiguous()
    tokens = math.prod(x.shape[:-1])
    fits = rows == features
    if not fits or not run(x.data_ptr(), tokens, inner, pointer(residual), y.data_ptr()):
        for packed in matrices:  # raises if it was overwritten without torch noticing
            check_packed(packed)
        raise ValueError(
            f"the packed matrix does not map {inner} features to {features}, or this "
            "machine has no kernel for it"
        )
    return y


def _require_tokens(x: Tensor) -> None:
    require_floats(x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar")


def expand_residual(y: Tensor, residual: Tensor) -> Tensor:
    """Returns a residual expanded to the shape of the outputs `y`.

    Raises:
        ValueError: If it is not float32, or cannot be expanded to that shape.
    """
    require_floats(residual)
    try:
        return residual.expand(y.shape)
    except RuntimeError:
        given, allowed = tuple(residual.shape), tuple(y.shape)
        raise ValueError(
            f"residual is of shape {given}, which cannot be expanded to outputs of {allowed}"
        ) from None


def pointer(tensor: Tensor | None) -> int | None:
    """Returns the address of a tensor, or None for None."""
    return None if tensor is None else tensor.data_ptr()


def activation_number(name: str) -> int:
    """Returns the number of an activation in the C interface.

    Raises:
        ValueError: If there is no kernel for it.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {ACTIVATIONS}")
    return ACTIVATIONS.index(name)


def require_rows(
    name: str, tensor: Tensor | None, rows: int, *, dtype: torch.dtype = torch.float32
) -> None:
    """Checks that a tensor, unless it is None, holds one value for each row of a packed matrix.

    Args:
        name: Name of the tensor in the error message.
        tensor: Tensor to check.
        rows: Number of rows of the packed matrix.
        dtype: Required dtype.

    Raises:
        ValueError: If the shape or the dtype is wrong, or the tensor is not contiguous.
    """
    if tensor is None:
        return
    together = tensor.is_contiguous()
    if tensor.dtype != dtype or tensor.shape != (rows,) or not together:
        given = f"{tuple(tensor.shape)} and {tensor.dtype}{'' if together else ', not contiguous'}"
        raise ValueError(f"{name} is of shape {given}: it must hold {rows} values of {dtype}")


def require_floats(x: Tensor) -> None:
    """Checks that a tensor is float32.

    Raises:
        ValueError: If it is not.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"sparse kernels need float32, not {x.dtype}")


# Linear layers

operators.define(
    "sparse_linear(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, int features, "
    "str activation) -> Tensor"
)
operators.define(
    "sparse_feed_forward(Tensor x, Tensor packed, Tensor? bias, str activation, Tensor then, "
    "Tensor? then_bias, Tensor? residual, int features, int? middle=None) -> Tensor"
)


def _sparse_linear(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    rows = rows_of(packed)
    require_rows("bias", bias, rows)
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_linear(  # type: ignore[no-any-return]
            *(x, tokens, inner, rows, packed.data_ptr(), packed.numel(), pointer(bias), more),
            *(number, y, torch.get_num_threads()),
        )

    return run_on_tokens(run, (packed,), x, residual, features=features, rows=rows)


def _sparse_linear_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    _activation: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def _dense_linear(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    _require_tokens(x)
    weight = unpack_linear(packed, x.shape[-1], features)
    y = _activate(functional.linear(x, weight, bias), activation)
    return y if residual is None else y + expand_residual(y, residual)


def unpack_linear(packed: Tensor, inputs: int, features: int) -> Tensor:
    """Returns the dense weight (features, inputs) of a packed matrix.

    Args:
        packed: Packed matrix of a Linear layer.
        inputs: Number of columns.
        features: Number of rows.

    Raises:
        ValueError: If the packed matrix has another number of rows or columns.
    """
    columns: Tensor = torch.ops.torchcram.sparse_linear(
        torch.eye(inputs, device=packed.device), packed, None, None, features, "none"
    )
    return columns.t().contiguous()


def _activate(x: Tensor, activation: str) -> Tensor:
    activation_number(activation)  # raises for an unknown activation
    if activation.startswith("gelu"):
        return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "silu":
        return functional.silu(x)
    return functional.relu(x) if activation == "relu" else x


def _sparse_feed_forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    then: Tensor,
    then_bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    middle: int | None = None,
) -> Tensor:
    first_rows, rows = rows_of(packed), rows_of(then)
    require_rows("bias", bias, first_rows)
    require_rows("then_bias", then_bias, rows)
    if middle not in (None, first_rows):
        raise ValueError(f"the first packed matrix has {first_rows} rows, not {middle}")
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_feed_forward(  # type: ignore[no-any-return]
            *(x, tokens, inner, first_rows, rows, packed.data_ptr(), packed.numel()),
            *(pointer(bias), number, then.data_ptr(), then.numel(), pointer(then_bias)),
            *(more, y, torch.get_num_threads()),
        )

    return run_on_tokens(run, (packed, then), x, residual, features=features, rows=rows)


def _sparse_feed_forward_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _activation: str,
    _then: Tensor,
    _then_bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    _middle: int | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def _dense_feed_forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    then: Tensor,
    then_bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    middle: int | None = None,
) -> Tensor:
    if middle is None:  # always given in a trace, in which `packed` has no data
        middle = rows_of(packed)
    h = _dense_linear(x, packed, bias, None, middle, activation)
    return _dense_linear(h, then, then_bias, residual, features, "none")


register("sparse_linear", _sparse_linear, shape=_sparse_linear_shape, dense=_dense_linear)
register(
    "sparse_feed_forward",
    _sparse_feed_forward,
    shape=_sparse_feed_forward_shape,
    dense=_dense_feed_forward,
)


# Linear layers in 8 bits. A layer is its packed matrix, the initial sum of each row, its scales and
# its bias.

Layer = ctypes.Array[ctypes.c_int64]
"""A layer as the kernels take it: `LayerInt8` in packed.h."""

_LAYER = "Tensor {0}packed, Tensor {0}start, Tensor {0}scales, Tensor? {0}bias"
operators.define(
    f"sparse_linear_int8(Tensor x, {_LAYER.format('')}, Tensor? residual, int features, "
    "str activation) -> Tensor"
)
operators.define(
    f"sparse_feed_forward_int8(Tensor x, {_LAYER.format('')}, {_LAYER.format('then_')}, "
    "Tensor? residual, int features, str activation) -> Tensor"
)


def _layer(
    packed: Tensor, start: Tensor, scales: Tensor, bias: Tensor | None, *, prefix: str = ""
) -> Layer:
    rows = rows_of(packed)
    require_rows(f"{prefix}start", start, rows, dtype=torch.int32)
    require_rows(f"{prefix}scales", scales, rows)
    require_rows(f"{prefix}bias", bias, rows)
    numbers = (packed.data_ptr(), packed.numel(), rows, *map(pointer, (start, scales, bias)))
    return (ctypes.c_int64 * 6)(*(number or 0 for number in numbers))


def _run_int8(
    x: Tensor,
    matrices: tuple[Tensor, ...],
    first: Layer,
    second: Layer | None,
    *,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_linear_int8(  # type: ignore[no-any-return]
            *(x, tokens, inner, features, first, number, second, more),
            *(y, torch.get_num_threads()),
        )

    rows = rows_of(matrices[-1])
    return run_on_tokens(run, matrices, x, residual, features=features, rows=rows)


def _sparse_linear_int8(
    x: Tensor,
    packed: Tensor,
    start: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    layer = _layer(packed, start, scales, bias)
    return _run_int8(
        x, (packed,), layer, None, residual=residual, features=features, activation=activation
    )


def _sparse_feed_forward_int8(
    x: Tensor,
    packed: Tensor,
    start: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    then_packed: Tensor,
    then_start: Tensor,
    then_scales: Tensor,
    then_bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    first = _layer(packed, start, scales, bias)
    second = _layer(then_packed, then_start, then_scales, then_bias, prefix="then_")
    matrices = (packed, then_packed)
    return _run_int8(
        x, matrices, first, second, residual=residual, features=features, activation=activation
    )


def _int8_shape(x: Tensor, *rest: int) -> Tensor:
    features = rest[-2]  # the activation is the last argument
    return x.new_empty((*x.shape[:-1], features))


def _no_derivative(*_: object) -> Tensor:
    raise RuntimeError(
        "sparse layers in 8 bits have no derivatives, because they round their inputs: run them "
        "under torch.no_grad(), or prepare the model without int8=True"
    )


register("sparse_linear_int8", _sparse_linear_int8, shape=_int8_shape, dense=_no_derivative)
register(
    "sparse_feed_forward_int8", _sparse_feed_forward_int8, shape=_int8_shape, dense=_no_derivative
)


# Convolutions. The kernels read and write [image][channel][row][column] or, with `by_images`,
# [row][column][channel][image]. Outputs have the memory layout of the inputs, and channels_last if
# those of a dense convolution would have it.

# Dimensions of (image, channel, row, column), from the outermost to the innermost in memory.
_CONTIGUOUS, _CHANNELS_LAST, _INNERMOST = (0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 1, 0)
_BACK = (3, 2, 0, 1)  # inverse of _INNERMOST

operators.define(
    "sparse_conv2d(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, SymInt features, "
    "int[] geometry, bool by_images, bool relu, bool channels_last=False) -> Tensor"
)


def _sparse_conv2d(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    relu: bool,
    channels_last: bool = False,
) -> Tensor:
    rows = rows_of(packed)
    require_rows("bias", bias, rows)
    shape = _geometry(geometry)
    size = _output_size(x, shape, features)
    batch, channels, height, width = x.shape
    native = _INNERMOST if by_images else _CONTIGUOUS
    y = _empty(x, size, native)
    residual = _like_output(residual, y, by_images)
    if by_images:
        planes, padded = x.permute(_INNERMOST).contiguous(), (height, width)
    else:
        planes, padded = _padded(x, shape)
    good = rows == features and kernels().torchcram_convolution(
        planes.data_ptr(),
        convolution_struct(shape, batch, channels, (height, width), padded),
        features,
        packed.data_ptr(),
        packed.numel(),
        by_images,
        pointer(bias),
        pointer(residual),
        int(relu),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    if not good:
        check_packed(packed)  # raises if it was overwritten without torch noticing
        raise ValueError(
            f"the packed matrix does not hold {shape} from {channels} channels to {features}"
        )
    layout = _output_layout(x, by_images=by_images, channels_last=channels_last)
    return y if layout == native else _empty(x, size, layout).copy_(y)


def _sparse_conv2d_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    _relu: bool,
    channels_last: bool = False,
) -> Tensor:
    layout = _output_layout(x, by_images=by_images, channels_last=channels_last)
    return _empty(x, _output_size(x, _geometry(geometry), features), layout)


def _dense_conv2d(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    relu: bool,
    channels_last: bool = False,
) -> Tensor:
    shape = _geometry(geometry)
    _output_size(x, shape, features)  # raises if `x` is no batch of images
    weight = unpack_conv2d(packed, x.shape[1], features, geometry, by_images=by_images)
    if channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    y = functional.conv2d(x, weight, bias, shape.stride, shape.padding, shape.dilation)
    y = y if residual is None else y + expand_residual(y, residual)
    return functional.relu(y) if relu else y


def unpack_conv2d(
    packed: Tensor, channels: int, features: int, geometry: Sequence[int], *, by_images: bool
) -> Tensor:
    """Returns the dense weight (features, channels, rows, columns) of a packed convolution.

    Args:
        packed: Packed matrix of the convolution.
        channels: Number of input channels.
        features: Number of output channels.
        geometry: Kernel size, stride, padding and dilation, (rows, columns) of each.
        by_images: Whether the matrix was packed for panels of images.

    Raises:
        ValueError: If the packed matrix has another shape.
    """
    shape = _geometry(geometry)
    (rows, columns), (down, right) = shape.kernel, shape.dilation
    count = channels * rows * columns
    # One image for each weight of a kernel: as large as the kernel, with a one at that weight.
    images = torch.zeros(
        (count, channels, down * (rows - 1) + 1, right * (columns - 1) + 1), device=packed.device
    )
    ones = torch.eye(count, device=packed.device).view(count, channels, rows, columns)
    images[:, :, ::down, ::right] = ones
    unpadded = [*geometry[:4], 0, 0, *geometry[6:]]
    columns_of_weight: Tensor = torch.ops.torchcram.sparse_conv2d(
        images, packed, None, None, features, unpadded, by_images, False
    )
    return columns_of_weight.flatten(1).t().reshape(features, channels, rows, columns).contiguous()


def is_channels_last(x: Tensor) -> bool:
    """Returns whether torch treats a tensor of four dimensions as channels_last.

    Like the convolutions of torch, it looks at the strides: with one channel or one pixel, the same
    memory can be in either format.
    """
    sizes, strides = x.shape, x.stride()
    if sizes[1] > 1 and sizes[2] * sizes[3] > 1 and x.is_contiguous():
        return False  # faster than the loop below
    least = 0
    for dimension in (1, 3, 2, 0):
        if sizes[dimension] == 0 or strides[dimension] == 0 or strides[dimension] < least:
            return False
        if dimension == 0 and least == strides[1]:
            return False
        least = strides[dimension] * max(sizes[dimension], 1)
    return True


def images_innermost(x: Tensor) -> Tensor:
    """Returns a batch of images with the images as the innermost dimension in memory."""
    return x.permute(_INNERMOST).contiguous().permute(_BACK)


def _output_size(x: Tensor, shape: Geometry, features: int) -> tuple[int, ...]:
    require_floats(x)
    if x.dim() != 4:
        raise ValueError(f"x is of shape {tuple(x.shape)}, not (images, channels, rows, columns)")
    images, _, height, width = x.shape
    rows, columns = shape.output(height, width)
    if rows < 1 or columns < 1:
        raise ValueError(f"the kernel does not fit images of {height} x {width}: {shape}")
    return images, features, rows, columns


def _geometry(numbers: Sequence[int]) -> Geometry:
    return _geometry_of(tuple(numbers))


@functools.lru_cache(maxsize=1024)
def _geometry_of(numbers: tuple[int, ...]) -> Geometry:
    if len(numbers) != 8:
        raise ValueError(f"geometry must have 8 numbers, got {numbers}")
    pairs = [(numbers[i], numbers[i + 1]) for i in range(0, 8, 2)]
    return Geometry(*pairs)


def _output_layout(x: Tensor, *, by_images: bool, channels_last: bool) -> tuple[int, ...]:
    """Returns the dimensions of the output from the outermost to the innermost in memory."""
    if is_channels_last(x):
        return _CHANNELS_LAST
    if by_images and not x.is_contiguous() and x.permute(_INNERMOST).is_contiguous():
        return _INNERMOST
    return _CHANNELS_LAST if channels_last and len(x) else _CONTIGUOUS  # as in torch


def _empty(x: Tensor, size: tuple[int, ...], layout: tuple[int, ...]) -> Tensor:
    if layout == _CONTIGUOUS:
        return x.new_empty(size)
    back = [layout.index(dimension) for dimension in range(4)]
    return x.new_empty([size[dimension] for dimension in layout]).permute(back)


def _like_output(residual: Tensor | None, y: Tensor, by_images: bool) -> Tensor | None:
    if residual is None:
        return None
    residual = expand_residual(y, residual)
    return residual.permute(_INNERMOST).contiguous() if by_images else residual.contiguous()


def _padded(x: Tensor, shape: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """Returns padded images [image][channel][remainder][row][column] and their rows and columns."""
    (top, left), stride = shape.padding, shape.stride[1]
    height, width = x.shape[2:]
    size = height + 2 * top, -(-(width + 2 * left) // stride)
    x = x.contiguous()
    if not (top or left or stride > 1):
        return x, size
    y = x.new_empty((*x.shape[:2], stride, *size))
    planes = x.shape[0] * x.shape[1]
    kernels().torchcram_pad(
        *(x.data_ptr(), planes, height, width, top, left, *size, stride, y.data_ptr()),
        torch.get_num_threads(),
    )
    return y, size


register("sparse_conv2d", _sparse_conv2d, shape=_sparse_conv2d_shape, dense=_dense_conv2d)


# Attention of all tokens to all tokens

operators.define(
    "attention(Tensor query, Tensor key, Tensor value, int heads, float scale) -> Tensor"
)


def _attention(query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float) -> Tensor:
    _require_same_shape(query, key, value, heads)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    batch, tokens, features = query.shape
    y = torch.empty_like(query)
    done = y.numel() == 0 or kernels().torchcram_attention(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), batch, tokens, heads),
        *(features // heads, scale, y.data_ptr(), torch.get_num_threads()),
    )
    if done:
        return y
    q, k, v = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def _attention_shape(
    query: Tensor, _key: Tensor, _value: Tensor, _heads: int, _scale: float
) -> Tensor:
    return query.new_empty(query.shape)


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float) -> Tensor:
    _require_same_shape(query, key, value, heads)
    size = heads, query.shape[2] // heads
    q, k, v = (each.unflatten(2, size).transpose(1, 2) for each in (query, key, value))
    weights = functional.softmax(q @ k.transpose(2, 3) * scale, dim=3)
    y: Tensor = weights @ v
    return y.transpose(1, 2).flatten(2)


def _require_same_shape(query: Tensor, key: Tensor, value: Tensor, heads: int) -> None:
    for each in (query, key, value):
        require_floats(each)
    shapes = [tuple(each.shape) for each in (query, key, value)]
    if shapes != shapes[:1] * 3 or query.dim() != 3 or heads < 1 or query.shape[2] % heads:
        raise ValueError(
            "query, key and value must have the same shape (sequences, tokens, features), with "
            f"features divisible by the heads, got shapes {shapes} for {heads} heads"
        )


register("attention", _attention, shape=_attention_shape, dense=_dense_attention)
