"""`prepare`: a copy of a model whose sparse layers run on the CPU kernels."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from torchcram.kernels.cpu.library import available, has_openmp
from torchcram.runtime.cpu.batches import PANEL_IMAGES, BatchSplitter
from torchcram.runtime.cpu.fuse import (
    as_graph,
    fuse_encoder_,
    fuse_epilogues_,
    replace_max_pools_,
)
from torchcram.runtime.cpu.image_layouts import choose_by_images, lay_images_innermost_
from torchcram.runtime.cpu.modules import PackedLayer, SparseConv2d
from torchcram.runtime.cpu.reordered import ReorderedConv2d, ReorderedLinear
from torchcram.runtime.cpu.replace_layers import (
    Choice,
    Inputs,
    call,
    candidates,
    dense_choice,
    fastest,
    layer_inputs,
    replace_layers_,
    time_models,
)
from torchcram.runtime.marking import mark_prepared_
from torchcram.runtime.outputs import output_error, outputs_close
from torchcram.weights import layer_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CLOSE, _CLOSE_INT8 = 2e-5, 0.1  # of the largest output: rounding errors only
_AS_EXACT, _ROUGH = 4, 0.01  # times the error of the dense model, which must be small itself
_CACHE_BYTES = 2**24  # activations of this size do not stay in the caches
_FEW_ZEROS = 0.65  # mean sparsity of sparse layers below which dense layers may be faster
_REPORT = "_torchcram_report"


def prepare(
    model: nn.Module,
    example_inputs: Inputs | None = None,
    *,
    fuse: bool = True,
    int8: bool = False,
) -> nn.Module:
    """Returns a copy of `model` in eval mode that skips the zeros in its weights on the CPU.

    Linear and Conv2d layers get sparse kernels where that is faster. With an example, each layer is
    timed with the shapes and memory formats in use, and then the model as a whole, which stays
    dense if it does not get faster. Without an example nothing is timed, and only layers that are
    large and sparse enough to be faster with any input become sparse. `report` tells what was done
    with each layer, and why. If the kernels have not been built, all layers stay dense.

    With an example, a model that `torch.fx` can trace is also fused: batch norms are folded into
    convolutions, and sparse layers compute the activation and the addition that follow them. The
    outputs for the example are compared with those of the model; if they differ, it is not fused.

    Args:
        model: Model with compressed weights; it stays unchanged.
        example_inputs: Inputs that the model is called with: a tensor, a tuple of arguments, or a
            mapping of keyword arguments. Kernels are chosen for their batch size and shape; other
            inputs work, too.
        fuse: Whether to fuse operations into sparse layers.
        int8: Whether Linear layers may compute in 8 bits if there are kernels for it (AVX-512
            VNNI, NEON). Weights are rounded per output and activations per token, which changes
            outputs by about 1 %.
    """
    fast = copy.deepcopy(model).eval().requires_grad_(False)
    if "" in candidates(fast):  # a model that is a single layer cannot be changed in place
        fast = nn.Sequential(fast)
    others = _without_kernel(fast)
    if not available():
        choices = [
            dense_choice(name, layer, "no kernels") for name, layer in candidates(fast).items()
        ]
        return with_report(fast, [*choices, *others])
    if example_inputs is None:
        choices = replace_layers_(fast, int8=int8)
        mark_prepared_(fast, model)
        return with_report(fast, [*choices, *others])
    with torch.no_grad():
        fast = _prepared(fast, example_inputs, fuse=fuse, int8=int8)
    if isinstance(fast, BatchSplitter):
        others = _in_splitter(others)
    mark_prepared_(fast, model)
    return with_report(fast, [*report(fast), *others])


def _without_kernel(model: nn.Module) -> list[Choice]:
    """Returns the choices for weights of layers without a kernel; all of them stay dense."""
    choices = []
    known = {id(layer._parameters.get("weight")) for layer in candidates(model).values()}
    for name, weight in layer_weights(model).items():
        if id(weight) in known:
            continue
        path, _, parameter = name.rpartition(".")
        kind = type(model.get_submodule(path)).__name__
        zeros = 1 - int(torch.count_nonzero(weight)) / max(weight.numel(), 1)
        label = path if parameter == "weight" else name
        choices.append(Choice(label, kind, zeros, False, f"there is no kernel for {kind} layers"))
    return choices


def _prepared(dense: nn.Module, example: Inputs, *, fuse: bool, int8: bool) -> nn.Module:
    """Returns the fastest model that has the outputs of `dense` for the example."""
    expected = call(dense, example)
    exact = cache(partial(_in_float64, dense, example))

    def agrees(other: nn.Module, *, int8: bool) -> bool:
        try:
            actual = call(other, example)
        except Exception:  # noqa: BLE001  a model that does not run is not used, whatever the reason
            return False
        if outputs_close(expected, actual, _CLOSE_INT8 if int8 else _CLOSE):
            return True
        if int8 or exact() is None:
            return False
        return output_error(exact(), actual) <= _AS_EXACT * output_error(exact(), expected) < _ROUGH

    same = partial(agrees, int8=int8)
    fused = _fused(dense, example, expected, same, int8=int8) if fuse else None
    if fused is not None and not _slower(dense, fused, example):
        return fused
    inputs = layer_inputs(dense, example)
    for eight in (True, False) if int8 else (False,):
        fast = copy.deepcopy(dense)
        choices = replace_layers_(fast, inputs, int8=eight)
        if agrees(fast, int8=eight):
            break
    else:
        why = "the outputs differ"
        return with_report(dense, [_stays_dense(choice, why) for choice in choices])
    encoder = copy.deepcopy(fast)
    if fuse and fuse_encoder_(encoder) and agrees(encoder, int8=eight):
        fast = encoder
    new = (PackedLayer, ReorderedLinear, ReorderedConv2d)
    changed = any(isinstance(layer, new) for layer in fast.modules())
    slower = changed and _slower(dense, fast, example)
    if slower:
        return with_report(dense, [_stays_dense(choice, slower) for choice in choices])
    return with_report(fast, choices)


def _in_float64(model: nn.Module, example: Inputs) -> object | None:
    """Returns the outputs of a model in float64, or None if it does not run in float64.

    Deep models may amplify rounding errors, so that their outputs depend on the order of sums.
    """
    try:
        return call(copy.deepcopy(model).double(), _as_double(example))
    except Exception:  # noqa: BLE001  such as an operator without float64
        return None


def _as_double(inputs: Any) -> Any:  # noqa: ANN401
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {name: _as_double(value) for name, value in inputs.items()}
    return tuple(map(_as_double, inputs)) if isinstance(inputs, tuple) else inputs


def _slower(dense: nn.Module, sparse: nn.Module, example: Inputs) -> str:
    """Returns why a model with sparse layers does not pay, or an empty string if it does."""
    times = time_models(partial(call, dense, example), partial(call, sparse, example))
    if times.sparse < times.dense:
        return ""
    return (
        "the model as a whole is not faster with its sparse layers "
        f"({times.sparse:.3g} ms, dense {times.dense:.3g} ms)"
    )


def report(model: nn.Module) -> tuple[Choice, ...]:
    """Returns what `prepare` did with each layer of `model`.

    Args:
        model: Model that `prepare` returned.

    Raises:
        ValueError: If the model does not come from `prepare`.
    """
    choices: tuple[Choice, ...] | None = getattr(model, _REPORT, None)
    if choices is None:
        raise ValueError(
            f"this {type(model).__name__} does not come from torchcram.runtime.prepare"
        )
    return choices


def _fused(
    dense: nn.Module,
    example: Inputs,
    expected: object,
    agrees: Callable[[nn.Module], bool],
    *,
    int8: bool,
) -> nn.Module | None:
    """Returns the fastest graph that has the outputs of `dense`, or None if there is none.

    Args:
        dense: Model with dense layers.
        example: Inputs that the model is called with.
        expected: Outputs of the model for the example.
        agrees: Function that tells whether a model has these outputs.
        int8: Whether Linear layers may compute in 8 bits.
    """
    graph = as_graph(copy.deepcopy(dense))
    if graph is None:
        return None
    images: Tensor | None = None
    if isinstance(example, Tensor) and example.dim() == 4:
        # there seems to be one output per image
        per_image = isinstance(expected, Tensor) and expected.shape[:1] == example.shape[:1]
        images = example if per_image else None
    ways: dict[str, nn.Module | None] = {}
    if images is not None and len(images) > 1 and _exceeds_caches(graph, images):
        ways["image by image"] = _for_single_images(copy.deepcopy(graph), images, int8=int8)
    ways["together"] = (
        _for_inputs(graph, example, int8=int8)
        if images is None
        else _for_images(graph, images, int8=int8)
    )
    possible = {way: model for way, model in ways.items() if model is not None and agrees(model)}
    if not possible:
        return None
    fast = _fastest(possible, example) if len(possible) > 1 else next(iter(possible.values()))
    zeros = [choice.sparsity for choice in report(fast) if choice.sparse]
    if zeros and sum(zeros) / len(zeros) < _FEW_ZEROS:
        return _unless_dense_is_faster(fast, dense, example, agrees)
    return fast


def _unless_dense_is_faster(
    fast: nn.Module, dense: nn.Module, example: Inputs, agrees: Callable[[nn.Module], bool]
) -> nn.Module:
    """Returns a graph with sparse layers, or one with dense layers if that takes less time.

    A layer is timed with its weight in the caches. In a large model all weights are read from
    memory, and the sum of the layers' times says too little about the model.
    """
    graph = as_graph(copy.deepcopy(dense))
    other = None if graph is None else _for_inputs(graph, example, int8=False, sparse=False)
    if other is None or not agrees(other):
        return fast
    why = _slower(other, fast, example)
    if not why:
        return fast
    sparse = fast.model if isinstance(fast, BatchSplitter) else fast
    return with_report(other, [_stays_dense(choice, why) for choice in report(sparse)])


def _for_inputs(
    graph: fx.GraphModule, example: Inputs, *, int8: bool, sparse: bool = True
) -> nn.Module | None:
    """Returns a graph with sparse layers, changed in place, or None if it does not run."""
    try:
        with redirect_stderr(io.StringIO()):  # fx also prints errors
            inputs = layer_inputs(graph, example)
            _annotate_shapes_(graph, example)
            by_images = partial(choose_by_images, graph)
            choices = replace_layers_(
                graph, inputs, int8=int8, choose_by_images=by_images, sparse=sparse
            )
            _annotate_shapes_(graph, example)
            fuse_epilogues_(graph)
            replace_max_pools_(graph)
            lay_images_innermost_(graph)
    except Exception:  # noqa: BLE001  the model is then prepared without a graph
        return None
    return with_report(graph.eval(), choices)


def _for_images(graph: fx.GraphModule, example: Tensor, *, int8: bool) -> nn.Module | None:
    """Returns the fastest way to run a graph on a batch: at once, or a few images at a time."""
    images = PANEL_IMAGES * max(1, torch.get_num_threads() // 4)
    prepared = _for_inputs(graph, example[:images], int8=int8)
    if prepared is None or len(example) <= images:
        return prepared
    by_images = any(isinstance(m, SparseConv2d) and m.by_images for m in graph.modules())
    images = images if by_images else len(example)  # dense layers gain nothing from small parts
    beside = BatchSplitter(graph, images, side_by_side=True)
    together = BatchSplitter(graph, images) if by_images else graph
    if not beside.images_side_by_side(example):
        return _with_inner_report(together)
    ways = {"together": together, "side by side": beside}
    return _with_inner_report(_fastest(ways, example))


def _fastest(ways: Mapping[str, nn.Module], example: Inputs) -> nn.Module:
    """Returns the model that takes the least time for the example."""
    return ways[fastest({way: partial(call, model, example) for way, model in ways.items()})]


def _exceeds_caches(graph: fx.GraphModule, example: Tensor) -> bool:
    """Returns whether the activations of as many images as a panel has are too large."""
    try:
        with redirect_stderr(io.StringIO()):  # fx also prints errors
            inputs = layer_inputs(graph, example[:1])
    except Exception:  # noqa: BLE001  such as a model that needs several images
        return False
    shapes = [layer.shape for layer in inputs.values() if len(layer.shape) == 4]
    return any(4 * PANEL_IMAGES * math.prod(shape) > _CACHE_BYTES for shape in shapes)


def _for_single_images(graph: fx.GraphModule, example: Tensor, *, int8: bool) -> nn.Module | None:
    """Returns a graph that runs images one by one, or None if it does not run.

    Its layers are chosen for one image and, if threads can run images side by side, for one thread.
    """
    threads = torch.get_num_threads()
    try:
        if has_openmp():
            torch.set_num_threads(1)
        single = _for_inputs(graph, example[:1], int8=int8)
    finally:
        torch.set_num_threads(threads)
    if single is None:
        return None
    return _with_inner_report(BatchSplitter(single, 1, side_by_side=True, thread_images=1))


def _with_inner_report(model: nn.Module) -> nn.Module:
    """Returns a model in eval mode; a `BatchSplitter` gets the report of the model that it runs."""
    if isinstance(model, BatchSplitter):
        with_report(model, _in_splitter(report(model.model)))
    return model.eval()


def _in_splitter(choices: Iterable[Choice]) -> list[Choice]:
    """Returns the choices with the names that the layers have within a `BatchSplitter`."""
    return [replace(choice, name=f"model.{choice.name}") for choice in choices]


def _annotate_shapes_(graph: fx.GraphModule, example: Inputs) -> None:
    """Notes the shape and the memory format of every result in the graph."""
    arguments = example if isinstance(example, tuple) else (example,)
    if isinstance(example, Mapping):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        defaults = {str(node.target): node.args[0] if node.args else None for node in inputs}
        arguments = tuple({**defaults, **example}.values())
    ShapeProp(graph).propagate(*arguments)


def _stays_dense(choice: Choice, why: str) -> Choice:
    """Returns the choice for a layer that stays dense because the model as a whole does."""
    reason = f"{choice.reason}, but {why}"
    return replace(choice, sparse=False, reason=reason) if choice.sparse else choice


def with_report(model: nn.Module, choices: list[Choice]) -> nn.Module:
    """Attaches to a model what `report` returns for it, and returns the model."""
    setattr(model, _REPORT, tuple(choices))
    return model
