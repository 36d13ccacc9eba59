"""Large batches of images: a few images at a time, so that their activations stay in the caches."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from torchcram.kernels.cpu.library import has_openmp, set_openmp_threads
from torchcram.runtime.cpu.packing import PANEL_IMAGES


class BatchSplitter(nn.Module):
    """Runs a model on a few images at a time.

    Args:
        model: Model that treats each image independently.
        images: Number of images at a time, with all threads working on them.
        side_by_side: Whether every thread runs the whole model on images of its own, as far as
            there are enough images for all threads. Then no thread waits for the others after each
            layer.
        thread_images: Number of images that a thread takes at a time if they run side by side.
    """

    def __init__(
        self,
        model: nn.Module,
        images: int,
        *,
        side_by_side: bool = False,
        thread_images: int = PANEL_IMAGES,
    ) -> None:
        super().__init__()
        self.model, self.images, self.side_by_side = model, images, side_by_side
        self.thread_images = thread_images

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all images."""
        beside = self.images_side_by_side(x)
        if beside == 0 and len(x) <= self.images:
            whole: Tensor = self.model(x)
            return whole
        parts = x[:beside].split(self.thread_images)
        outputs = run_side_by_side(self.model, parts) if beside else []
        if beside < len(x):
            outputs += [self.model(part) for part in x[beside:].split(self.images)]
        return torch.cat(outputs)

    def images_side_by_side(self, x: Tensor) -> int:
        """Returns how many images the threads take side by side; the others come after them."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return 0
        threads = torch.get_num_threads()
        if not self.side_by_side or threads == 1 or not has_openmp():
            return 0
        if torch.is_grad_enabled() and x.requires_grad:
            return 0
        return len(x) // (threads * self.thread_images) * threads * self.thread_images


def run_side_by_side(model: nn.Module, parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the outputs of the parts; as many of them run at a time as torch has threads."""
    inference = torch.is_inference_mode_enabled()

    def run(part: Tensor) -> Tensor:
        with torch.inference_mode() if inference else torch.no_grad():
            output: Tensor = model(part)
            return output

    return list(_pool(torch.get_num_threads()).map(run, parts))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "torchcram", set_openmp_threads, (1,))


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)
