"""Sums over the inputs of layers, collected batch by batch without storing activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from torchcram.layers import layout_of, reduction_last, some_of
from torchcram.messages import list_names, warn_caller
from torchcram.weights import is_conv1d

if TYPE_CHECKING:
    from torchcram.pruners.base import Calibration
    from torchcram.weights import LayerWeights, Weights


def square_sums(calibration: Calibration, weights: Weights) -> dict[str, Tensor]:
    """Returns sum x_j^2 for every input j of every layer, as (groups, inputs per output)."""
    run = calibration.run
    return _sums(calibration, weights, lambda x: x.square().sum(-1, dtype=torch.float64), run)


def products(
    calibration: Calibration, weights: Weights, run: Callable[[], object] | None = None
) -> dict[str, Tensor]:
    """Returns X X^T of every layer, as (groups, inputs per output, inputs per output).

    Args:
        calibration: Model and batches.
        weights: Weights of the layers.
        run: Function that runs the layers on all batches; by default it runs the whole model.
    """
    return _sums(calibration, weights, lambda x: x @ x.mT, run or calibration.run)


def as_matrices(weights: Weights, name: str, layer: nn.Module) -> Tensor:
    """Returns a weight as (groups, outputs, inputs per output), kernel positions outermost."""
    rows = reduction_last(weights, name).flatten(2).squeeze(0)
    matrices: Tensor = rows.unflatten(0, (getattr(layer, "groups", 1), -1))
    return matrices


def from_matrices(weights: Weights, name: str, matrices: Tensor) -> Tensor:
    """Returns matrices such as those of `as_matrices` in the shape of the weight."""
    tensor = torch.empty_like(weights[name], dtype=matrices.dtype)
    view = reduction_last(weights, name, tensor)
    view.copy_(matrices.reshape(view.shape))
    return tensor


def split_by_visible_inputs(
    operator: str, model: nn.Module, weights: Weights
) -> tuple[LayerWeights, LayerWeights]:
    """Returns the weights whose inputs can be observed, and the others, named in a warning.

    Attention and recurrent layers of torch and fused experts compute the inputs of their weights
    internally: no module is called with these inputs, so no hook receives them.

    Args:
        operator: Text of the pruner, which prunes the other weights by magnitude.
        model: Model of the weights.
        weights: Weights to prune.
    """
    inside = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))
        for parameter in module.parameters()
    }
    hidden = [
        name
        for name, weight in weights.items()
        if id(weight) in inside or layout_of(weights, name).stacked
    ]
    if hidden:
        _warn_by_magnitude(operator, tuple(hidden))
    seen = [name for name in weights if name not in set(hidden)]
    return some_of(weights, seen), some_of(weights, hidden)


@functools.cache
def _warn_by_magnitude(operator: str, names: tuple[str, ...]) -> None:
    warn_caller(
        f"{operator} cannot see the inputs of attention, recurrent and fused expert layers and "
        f"prunes these by magnitude: {list_names(names)}"
    )


def layers_of(model: nn.Module, weights: Weights) -> dict[str, list[nn.Module]]:
    """Returns the layers that use each weight: one, or several that share it.

    Raises:
        ValueError: If the inputs of a layer cannot be observed.
    """
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        users.setdefault(id(module._parameters.get("weight")), []).append(module)
    layers = {name: users.get(id(weight), []) for name, weight in weights.items()}
    for name, modules in layers.items():
        kinds = {type(module).__name__ for module in modules} or {"no layer"}
        if not modules or not all(map(_is_visible, modules)):
            raise ValueError(
                f"{name!r} is the weight of {', '.join(sorted(kinds))}; allowed are Linear, Conv1d "
                "and Conv2d, and Conv1D of Transformers: leave it out by "
                "weights=compressible_weights(..., skip=)"
            )
    return layers


def _is_visible(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)) or is_conv1d(layer)


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the inputs of a layer that was called with these arguments."""
    inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
    return inputs


def _sums(
    calibration: Calibration,
    weights: Weights,
    summary: Callable[[Tensor], Tensor],
    run: Callable[[], object],
) -> dict[str, Tensor]:
    """Returns the sum of `summary` of the inputs of every layer over all batches."""
    sums: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
            inputs = first_input(args, named).detach()
            with torch.autocast(inputs.device.type, enabled=False):
                addend = summary(_columns(layer, inputs))
            sums[name] = sums[name].add_(addend) if name in sums else addend

        return hook

    hooks = []
    try:
        for name, layers in layers_of(calibration.model, weights).items():
            hooks += [
                layer.register_forward_pre_hook(hook_for(name), with_kwargs=True)
                for layer in layers
            ]
        run()
    finally:
        for hook in hooks:
            hook.remove()
    _check(weights, sums)
    return sums


def _check(weights: Iterable[str], sums: Mapping[str, Tensor]) -> None:
    """Raises ValueError for layers without inputs, and for inputs that are not finite."""
    if missed := [name for name in weights if name not in sums]:
        raise ValueError(
            f"no input reaches the layers of: {list_names(missed)}; leave them out by "
            "weights=compressible_weights(..., skip=)"
        )
    if bad := [name for name, total in sums.items() if not bool(total.isfinite().all())]:
        raise ValueError(f"inputs are not finite in the layers of: {list_names(bad)}")


def _columns(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Returns inputs as the columns of X: (groups, kernel positions x channels, samples)."""
    inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    if isinstance(layer, nn.Linear) or is_conv1d(layer):
        return inputs.reshape(-1, inputs.shape[-1]).T.unsqueeze(0)
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        raise TypeError(type(layer).__name__)
    if inputs.dim() == len(layer.kernel_size) + 1:
        inputs = inputs.unsqueeze(0)  # one sample without a batch dimension
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    inputs = pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    sizes = [layer.kernel_size, layer.dilation, layer.stride]
    if isinstance(layer, nn.Conv1d):
        inputs, sizes = inputs.unsqueeze(2), [(1, *size) for size in sizes]
    kernel, dilation, stride = sizes
    patches = unfold(inputs, kernel, dilation=dilation, stride=stride)  # (batch, ..., positions)
    split = patches.unflatten(1, (layer.groups, layer.in_channels // layer.groups, -1))
    columns: Tensor = split.permute(1, 3, 2, 0, 4).flatten(3).flatten(1, 2)
    return columns
