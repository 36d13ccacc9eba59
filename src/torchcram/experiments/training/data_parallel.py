"""A model on several processes: gradients averaged, batch-norm statistics brought together."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchcram.experiments.seeds import mixed

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket

    from torchcram.experiments.ranks import Ranks


def with_shared_statistics(model: nn.Module, device: torch.device, ranks: Ranks) -> nn.Module:
    """Returns `model` with batch norm over the batch of all processes, where torch can: on GPUs.

    Parameters and buffers keep their names.
    """
    if ranks.world_size == 1 or device.type != "cuda":
        return model
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return synced


def data_parallel(
    model: nn.Module, device: torch.device, ranks: Ranks, *, batch_size: int
) -> nn.Module:
    """Returns what to call in training: its backward leaves the gradient of the whole batch.

    Args:
        model: alike in all processes or not; from here on as it is in the first.
        device: of the model.
        ranks: Processes that share the work; rank 0 writes the files.
        batch_size: of the whole batch, whose parts need not be of one size.
    """
    if ranks.world_size == 1:
        return model
    kind = nn.parallel.DistributedDataParallel
    sync_buffers = "forward_sync_buffers"  # as later versions of torch call it
    if sync_buffers not in inspect.signature(kind).parameters:
        sync_buffers = "broadcast_buffers"
    options: dict[str, Any] = {sync_buffers: False}  # average_statistics_ does more, less often
    if device.type == "cuda":
        options["device_ids"] = [device]
    parallel = kind(model, **options)
    if batch_size % ranks.world_size:
        # torch refuses annotations that are text
        hook = lambda share, bucket: _weighted_sum(share, bucket)  # noqa: E731
        parallel.register_comm_hook(ranks.shard.share(batch_size), hook)
    return parallel


def _weighted_sum(share: float, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sums gradients, each a mean over a part of the batch, by how much of it the part is."""
    from torch import distributed as dist

    work = dist.all_reduce(bucket.buffer().mul_(share), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@torch.no_grad()
def average_statistics_(model: nn.Module, ranks: Ranks) -> None:
    """Puts the mean over the processes into the running statistics of batch norm.

    Layers that look at the batch of all processes have the same ones already.
    """
    if ranks.world_size == 1:
        return
    from torch import distributed as dist

    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        if isinstance(layer, nn.SyncBatchNorm):
            continue
        for statistic in (layer.running_mean, layer.running_var):
            if statistic is not None:
                dist.all_reduce(statistic)
                statistic.div_(ranks.world_size)


@contextmanager
def strides_as_they_come() -> Iterator[None]:
    """Keeps DDP from warning, for a `with` block, of gradients laid out as the images are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        yield


def seed_epoch(ranks: Ranks, seed: int, epoch: int) -> None:
    """Gives the processes global random numbers of their own (dropout), whatever came before."""
    if ranks.world_size > 1:
        torch.manual_seed(mixed(seed, "process", epoch, ranks.rank))
