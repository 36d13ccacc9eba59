"""A copy of a model that runs its sparse layers on the sparse kernels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from torchcram.native.library import available
from torchcram.runtime.encoders import fuse_encoder_
from torchcram.runtime.exchange import Inputs, call, exchange_layers_, input_shapes, left
from torchcram.runtime.fuse import as_graph, fuse_tails_, outputs_close
from torchcram.runtime.layers import Choice, candidates, is_faster
from torchcram.runtime.modules import SparseConv2d

_CLOSE, _CLOSE_INT8 = 1e-4, 0.2  # to the largest output: rounding, no more
_REPORT = "_torchcram_report"


def prepare(
    model: nn.Module,
    example_inputs: Inputs | None = None,
    *,
    fuse: bool = True,
    int8: bool = False,
) -> nn.Module:
    """Returns a copy of `model` in eval mode that runs fast on the CPU where its weights are zero.

    Linear and Conv2d layers get sparse kernels where it pays. With an example that is measured on
    the shapes in use, of each layer and then of the model as a whole, which stays dense if it does
    not get faster; without one a rule decides, by the number of zeros. `report` says what became of
    each layer. Where the kernels have not been built, all layers stay dense.

    With an example, a model that `torch.fx` can trace is also fused: batch norms are folded into
    convolutions, and sparse layers do the activation and the addition that follow them. The outputs
    for the example are compared with those of the model; if they differ, it is left unfused.

    Args:
        model: any module; its weights have been compressed.
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a mapping
            of keyword arguments. Layers get kernels that suit this batch size and shape; others
            work too.
        fuse: whether to fuse.
        int8: whether Linear layers may compute in 8 bits, where there are kernels for that (AVX-512
            VNNI): weights rounded per output, activations per token. Outputs change by about 1 %.
    """
    fast = copy.deepcopy(model).eval().requires_grad_(False)
    if "" in candidates(fast):  # a layer that is the model cannot be exchanged within it
        fast = nn.Sequential(fast)
    if not available():
        return _with_report(fast, [left(n, m, "no kernels") for n, m in candidates(fast).items()])
    if example_inputs is None:
        return _with_report(fast, exchange_layers_(fast, int8=int8))
    with torch.no_grad():
        expected = call(fast, example_inputs)

        def agrees(other: nn.Module) -> bool:
            relative = _CLOSE_INT8 if int8 else _CLOSE
            return outputs_close(expected, call(other, example_inputs), relative)

        def pays(other: nn.Module) -> bool:
            return is_faster(
                partial(call, dense, example_inputs), partial(call, other, example_inputs)
            )

        dense = copy.deepcopy(fast)
        graph = as_graph(copy.deepcopy(fast)) if fuse else None
        fused = None if graph is None else _fused(graph, example_inputs, int8=int8)
        if fused is not None and agrees(fused) and pays(fused):
            return fused
        choices = exchange_layers_(fast, input_shapes(fast, example_inputs), int8=int8)
        encoder = copy.deepcopy(fast)
        if fuse and fuse_encoder_(encoder) and agrees(encoder):
            fast = encoder
        if any(choice.sparse for choice in choices) and not pays(fast):
            return _with_report(dense, [_lost(choice) for choice in choices])
        return _with_report(fast, choices)


def report(model: nn.Module) -> tuple[Choice, ...]:
    """Returns what `prepare` did with each layer of `model`.

    Raises:
        ValueError: if `prepare` did not make the model.
    """
    found: tuple[Choice, ...] | None = getattr(model, _REPORT, None)
    if found is None:
        raise ValueError(
            f"this {type(model).__name__} does not come from torchcram.runtime.prepare"
        )
    return found


class InParts(nn.Module):
    """Runs a model on so few images at a time that what it computes stays in the caches.

    Args:
        model: one that treats each image alone.
        images: how many at a time.
    """

    def __init__(self, model: nn.Module, images: int) -> None:
        super().__init__()
        self.model, self.images = model, images

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all images."""
        if x.shape[0] <= self.images:
            whole: Tensor = self.model(x)
            return whole
        return torch.cat([self.model(part) for part in x.split(self.images)])


def _fused(graph: fx.GraphModule, example: Inputs, *, int8: bool) -> nn.Module | None:
    """Returns the graph with its sparse layers, or None where it does not run."""
    images = 16 * max(1, torch.get_num_threads() // 4)
    many = isinstance(example, Tensor) and example.dim() == 4 and example.shape[0] > images
    part = example[:images] if many and isinstance(example, Tensor) else example
    try:
        shapes = input_shapes(graph, part)
    except Exception:  # noqa: BLE001  a graph that does not run is no loss
        return None
    choices = exchange_layers_(graph, shapes, int8=int8)
    arguments = tuple(part.values()) if isinstance(part, Mapping) else part
    ShapeProp(graph).propagate(*(arguments if isinstance(arguments, tuple) else (arguments,)))
    fuse_tails_(graph)
    fast: nn.Module = graph
    if many and any(isinstance(m, SparseConv2d) and m.by_images for m in graph.modules()):
        fast = InParts(graph, images)
        choices = [replace(each, name=f"model.{each.name}") for each in choices]
    return _with_report(fast.eval(), choices)


def _lost(choice: Choice) -> Choice:
    """Returns what is said of a layer where the model as a whole is faster dense."""
    reason = f"{choice.reason}, but the model as a whole is not faster"
    return replace(choice, sparse=False, reason=reason) if choice.sparse else choice


def _with_report(model: nn.Module, choices: list[Choice]) -> nn.Module:
    setattr(model, _REPORT, tuple(choices))
    return model
