"""Data-parallel training: averaged gradients and shared batch-norm statistics."""

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
from torchcram.sharding import has_shards

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket

    from torchcram.experiments.ranks import Ranks


def with_shared_statistics(model: nn.Module, device: torch.device, ranks: Ranks) -> nn.Module:
    """Returns `model` with SyncBatchNorm if several processes train on GPUs.

    Parameters and buffers keep their names.
    """
    if ranks.world_size == 1 or device.type != "cuda":
        return model
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return synced


def data_parallel(
    model: nn.Module, device: torch.device, ranks: Ranks, *, batch_size: int
) -> nn.Module:
    """Wraps a model by DDP unless it is sharded; backward leaves the gradient of the whole batch.

    Args:
        model: Model; all ranks get the weights of rank 0.
        device: Device of the model.
        ranks: Processes that train together.
        batch_size: Number of samples in the whole batch; shards may differ in size.
    """
    if ranks.world_size == 1 or has_shards(model):
        return model  # FSDP averages by itself
    kind = nn.parallel.DistributedDataParallel
    sync_buffers = "forward_sync_buffers"  # its name in later versions of torch
    if sync_buffers not in inspect.signature(kind).parameters:
        sync_buffers = "broadcast_buffers"
    options: dict[str, Any] = {sync_buffers: False}  # average_statistics_ averages once an epoch
    if device.type == "cuda":
        options["device_ids"] = [device]
    parallel = kind(model, **options)
    if batch_size % ranks.world_size:
        # torch refuses annotations that are text
        hook = lambda share, bucket: _weighted_sum(share, bucket)  # noqa: E731
        parallel.register_comm_hook(ranks.shard.share(batch_size), hook)
    return parallel


def _weighted_sum(share: float, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sums the gradients of the ranks, each weighted by its share of the batch."""
    from torch import distributed as dist

    work = dist.all_reduce(bucket.buffer().mul_(share), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@torch.no_grad()
def average_statistics_(model: nn.Module, ranks: Ranks) -> None:
    """Averages the running statistics of batch norm over the ranks.

    SyncBatchNorm layers have the same statistics on all ranks already.
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
def ignore_grad_stride_warnings() -> Iterator[None]:
    """Hides DDP's warning about gradient strides, such as channels_last, for a `with` block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        yield


def seed_epoch(ranks: Ranks, seed: int, epoch: int) -> None:
    """Seeds the global generators of every rank differently, such as for dropout.

    The generators of a single process are left alone.
    """
    if ranks.world_size > 1:
        torch.manual_seed(mixed(seed, "process", epoch, ranks.rank))
