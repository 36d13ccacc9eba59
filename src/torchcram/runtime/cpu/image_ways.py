"""Ways to run a graph on images: all at once, a few at a time, one by one, or cut into tiles."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from torchcram.kernels.cpu.library import has_openmp
from torchcram.runtime.cpu.batches import BatchSplitter
from torchcram.runtime.cpu.image_parts import (
    ForImageSize,
    ImageParts,
    split_into_parts,
    tiles_for,
)
from torchcram.runtime.cpu.modules import SparseConv2d
from torchcram.runtime.cpu.packing import NOT_CUT, PANEL_IMAGES
from torchcram.runtime.cpu.prepared_graph import prepared_graph_
from torchcram.runtime.cpu.replace_layers import LayerInput, call, fastest, layer_inputs
from torchcram.runtime.cpu.reports import with_inner_reports

if TYPE_CHECKING:
    from collections.abc import Callable

_CACHE_BYTES = 2**24  # activations of this size do not stay in the caches


def fastest_for_images(
    graph: fx.GraphModule, images: Tensor, agrees: Callable[[nn.Module], bool], *, int8: bool
) -> nn.Module | None:
    """Returns the fastest way to run a graph on a batch of images, or None if there is none.

    Args:
        graph: Graph of dense layers; it stays unchanged.
        images: Images that the graph is called with.
        agrees: Function that tells whether a model has the outputs of the graph for them.
        int8: Whether Linear layers may compute in 8 bits.
    """
    shapes = _layer_shapes(graph, images[:1])
    in_tiles = _in_tiles(graph, images, shapes, int8=int8)
    if in_tiles is not None and not agrees(in_tiles):
        in_tiles = None
    ways: dict[str, nn.Module | None] = {}
    if in_tiles is None and len(images) > 1 and _exceeds_caches(shapes):
        ways["image by image"] = _for_single_images(copy.deepcopy(graph), images, int8=int8)
    ways["together"] = _together(copy.deepcopy(graph), images, int8=int8)
    possible = {way: model for way, model in ways.items() if model is not None and agrees(model)}
    if not possible:
        return None
    whole = _fastest(possible, images)
    if in_tiles is None or _fastest({"in tiles": in_tiles, "whole": whole}, images) is whole:
        return whole
    return with_inner_reports(ForImageSize(in_tiles, whole, (images.shape[2], images.shape[3])))


def _layer_shapes(graph: fx.GraphModule, example: Tensor) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the inputs of layers, by name; nothing if the graph does not run."""
    try:
        with redirect_stderr(io.StringIO()):  # fx also prints errors
            inputs: Mapping[str, LayerInput] = layer_inputs(graph, example)
    except Exception:  # noqa: BLE001  such as a model that needs several images
        return {}
    return {name: received.shape for name, received in inputs.items()}


def _fastest(ways: Mapping[str, nn.Module], images: Tensor) -> nn.Module:
    """Returns the model that takes the least time for a batch."""
    if len(ways) == 1:
        return next(iter(ways.values()))
    return ways[fastest({way: partial(call, model, images) for way, model in ways.items()})]


def _together(graph: fx.GraphModule, batch: Tensor, *, int8: bool) -> nn.Module | None:
    """Returns the fastest way to run a graph on a batch: at once, or a few images at a time."""
    images = PANEL_IMAGES * max(1, torch.get_num_threads() // 4)
    prepared = prepared_graph_(graph, batch[:images], int8=int8)
    if prepared is None or len(batch) <= images:
        return prepared
    by_images = any(isinstance(m, SparseConv2d) and m.by_images for m in graph.modules())
    images = images if by_images else len(batch)  # dense layers gain nothing from small parts
    beside = BatchSplitter(graph, images, side_by_side=True)
    together = BatchSplitter(graph, images) if by_images else graph
    if not beside.images_side_by_side(batch):
        return with_inner_reports(together)
    ways = {"together": together, "side by side": beside}
    return with_inner_reports(_fastest(ways, batch))


def _exceeds_caches(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether the activations of as many images as a panel has are too large."""
    images = [shape for shape in shapes.values() if len(shape) == 4]
    return any(4 * PANEL_IMAGES * math.prod(shape) > _CACHE_BYTES for shape in images)


def _for_single_images(graph: fx.GraphModule, batch: Tensor, *, int8: bool) -> nn.Module | None:
    """Returns a graph that runs images one by one, or None if it does not run.

    Its layers are chosen for one image and, if threads can run images side by side, for one thread.
    """
    with _one_thread():
        single = prepared_graph_(graph, batch[:1], int8=int8)
    if single is None:
        return None
    return with_inner_reports(BatchSplitter(single, 1, side_by_side=True, thread_images=1))


def _in_tiles(
    graph: fx.GraphModule, batch: Tensor, shapes: Mapping[str, tuple[int, ...]], *, int8: bool
) -> nn.Module | None:
    """Returns a graph that cuts images into tiles, or None if that is not possible or not faster.

    A graph for several images consists of parts, each on as many images at a time as suits it.
    Threads run a part on images of their own, side by side, as far as there are enough images.

    Args:
        graph: Graph; it stays unchanged.
        batch: Images that the graph is called with.
        shapes: Shapes of the inputs of its layers for one image, by name.
        int8: Whether Linear layers may compute in 8 bits.
    """
    if len(batch) == 1:
        return _graph_in_tiles(graph, batch, int8=int8)
    parts = split_into_parts(graph, shapes)
    if all(part.images == PANEL_IMAGES for part in parts):
        return None
    splitters, threads = [], torch.get_num_threads()
    for part in parts:
        few, beside = batch[: part.images], len(batch) >= part.images * threads
        with _one_thread() if beside else nullcontext():
            model = _graph_in_tiles(part.graph, few, int8=int8)
            if model is None:
                model = prepared_graph_(copy.deepcopy(part.graph), few, int8=int8)
        if model is None:
            return None
        splitters.append(
            BatchSplitter(model, part.images, side_by_side=True, thread_images=part.images)
        )
        batch = part.graph(batch)
    whole = ImageParts(*splitters)
    return with_inner_reports(whole) if _has_tiles(whole) else None


def _graph_in_tiles(graph: fx.GraphModule, images: Tensor, *, int8: bool) -> nn.Module | None:
    """Returns a graph that cuts images into tiles, or None if no layer gains by it."""
    tiles = tiles_for(len(images))
    if tiles == NOT_CUT:
        return None
    model = prepared_graph_(copy.deepcopy(graph), images, int8=int8, tiles=tiles)
    return model if model is not None and _has_tiles(model) else None


def _has_tiles(model: nn.Module) -> bool:
    return any(isinstance(m, SparseConv2d) and m.tiles != NOT_CUT for m in model.modules())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Has layers timed with one thread if threads can run images side by side."""
    threads = torch.get_num_threads()
    try:
        if has_openmp():
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
